"""Tables of `python -m benchmarks gradients`: one for each number of workers."""

from __future__ import annotations

from benchmarks.report import Line, markdown


def tables(rows: list[Line]) -> str:
    """Returns the times of the sums as Markdown."""
    parts = []
    sums = [row for row in rows if "path" in row]
    for workers in dict.fromkeys(row["workers"] for row in sums):
        by_name: dict[str, dict[int, str]] = {}
        for row in sums:
            if row["workers"] == workers:
                cell = f"{row['value']:.2f} / {row['p99_ms']:.2f} / {row['cpu_ms']:.2f}"
                by_name.setdefault(_name(row), {})[row["bytes"]] = cell
        sizes = list(next(iter(by_name.values())))
        head = [f"{workers} workers: p50 / p99 / processor, ms", *(f"{size:,} bytes" for size in sizes)]
        parts.append(markdown(head, [[name, *(cells[size] for size in sizes)] for name, cells in by_name.items()]))
    return "\n".join(parts)


def _name(row: Line) -> str:
    name = str(row["system"])
    return f"{name}, one by one, {row['loss']:.1%} lost" if row["path"].endswith("one by one") else name
