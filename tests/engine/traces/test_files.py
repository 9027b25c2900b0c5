"""Traces on disk: records as lines, parts, ranks, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from signalfire.traces.files import FORMAT, Record, TraceFile, file_of_rank, header_line, part_of, read_traces

RECORDS = [
    Record(0, "STARTED", None, None, 1, {"parameters": "00"}, {}),
    Record(3, "LOSS_COMPUTED", "main", 2, 4, {"loss": "0f", "output": "10"}, {"loss": float("inf")}),
]


def test_a_record_is_a_line_and_back(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(header_line({"torch": "2"}) + "".join(record.line() for record in RECORDS) + '{"iteration":4,"ev')
    file = TraceFile(path)
    assert list(file.records()) == RECORDS  # without the line that a killed process has not finished
    assert file.environments == [{"torch": "2"}]


def test_parts_and_ranks_are_found_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert file_of_rank(path, 2).name == "trace.rank2.jsonl"
    assert part_of(file_of_rank(path, 2), 3).name == "trace.rank2.part3.jsonl"
    for rank in range(2):
        for part, record in enumerate(RECORDS, 1):
            part_of(file_of_rank(path, rank), part).write_text(header_line({}) + record.line())
    assert [list(file.records()) for file in read_traces(path)] == [RECORDS, RECORDS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no complete line"),
        ("iteration,loss\n1,2\n", "is not a trace: line 1"),
        ("[1]\n", "is not a trace: line 1"),
        (f'{{"format": {FORMAT + 1}}}\n', "later version"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(content)
    with pytest.raises(ValueError, match=message):
        TraceFile(tmp_path / "trace")
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"is a folder; pass the trace file inside it, such as .*trace\.jsonl"):
        TraceFile(tmp_path)
