"""The examples of the documents do what they show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCUMENTS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("document", ["api.md"])
def test_examples_do_what_they_show(document: str) -> None:
    text = (DOCUMENTS / document).read_text()
    # All examples of a document are one session. Line numbers stay those of the document.
    session = re.sub(r"(?ms)^```pycon\n(.*?)^```$", r"\n\1\n", text)
    test = doctest.DocTestParser().get_doctest(session, {}, document, str(DOCUMENTS / document), 0)
    assert len(test.examples) > 20
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)
