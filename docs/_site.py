"""Hook of the documentation site: the pages and files that it takes from outside `docs/`.

Pages at the root of the repository are pages of the site, too. Other files that a page links to (sources, raw data,
pictures) are copied into the site. One link works in the repository and in the site.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "reports/benchmarks.md",
}
"""Pages outside `docs/`, and their places in the site."""
SHOWN = {".json", ".svg", ".png", ".md"}
"""Files that a browser shows; others are copied as text."""
REPOSITORY = re.compile(r"(?m)^.*\]\(api/\w+\.md\).*\n\n")
"""A link to the reference for readers of the repository, which the site has on the same page."""
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Rewrites links that leave `docs/`, and adds the files that they name. Drops what is for the repository alone."""
    sources = {place: source for source, place in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        target = os.path.normpath(Path(source).parent / link[2])
        if not (ROOT / target).is_file():
            return link[0]  # the site's own check reports it
        place = PAGES.get(target) or target.removeprefix("docs/")
        if place == target:
            place = f"repository/{target}" + ("" if Path(target).suffix in SHOWN else ".txt")
            if place not in files.src_uris:
                files.append(File.generated(config, place, abs_src_path=str(ROOT / target)))
        return f"{link[1]}{os.path.relpath(place, Path(page.file.src_uri).parent)}{link[3] or ''})"

    return LINK.sub(rewritten, REPOSITORY.sub("", markdown))
