"""Nothing measured is lost, and a damaged journal is told apart from a torn one."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.errors import WeighinError
from weighin.journal import NAME, Journal, read

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
RECORDS = st.dictionaries(TEXT, TEXT | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False))


def write(folder: Path, *records: dict[str, object]) -> None:
    journal = Journal(folder)
    for record in records:
        journal.append(record)
    journal.close()


def test_no_journal_is_no_record(tmp_path: Path) -> None:
    assert list(read(tmp_path)) == []


def test_a_record_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append({"event": "a"})
    assert (tmp_path / NAME).read_bytes() == b'{"event":"a"}\n'
    journal.append({"event": "b"})
    assert list(read(tmp_path)) == [{"event": "a"}, {"event": "b"}]  # while it is still open
    journal.close()


@given(records=st.lists(RECORDS, max_size=5))
def test_what_is_appended_reads_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]]
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    write(folder, *records)
    assert list(read(folder)) == records


@pytest.mark.parametrize("torn", [b"{", b'{"event":"c"}', b"\xff\xfe", b'{"event"'])
def test_a_torn_last_line_is_ignored_and_gone_when_the_journal_goes_on(tmp_path: Path, torn: bytes) -> None:
    write(tmp_path, {"event": "a"}, {"event": "b"})
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole + torn)
    assert list(read(tmp_path)) == [{"event": "a"}, {"event": "b"}]
    write(tmp_path, {"event": "d"})
    assert (tmp_path / NAME).read_bytes() == whole + b'{"event":"d"}\n'


def test_a_journal_that_is_torn_from_its_first_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event":')
    assert list(read(tmp_path)) == []
    write(tmp_path, {"event": "a"})
    assert list(read(tmp_path)) == [{"event": "a"}]


@pytest.mark.parametrize("damage", [b"{oops}", b"", b"[1]", b"7", b'"text"', b'{"event":"a"', b"\x00" * 40])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / NAME).write_bytes(b'{"event":"a"}\n' + damage + b'\n{"event":"b"}\n')
    with pytest.raises(WeighinError, match=r"journal\.jsonl, line 2 .*cannot be rebuilt"):
        list(read(tmp_path))


def test_a_line_that_is_not_utf8_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event":"a"}\n{"event":"\xff"}\n')
    with pytest.raises(WeighinError, match="line 2"):
        list(read(tmp_path))


def test_a_full_disk_says_what_is_kept_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append({"event": "a"})

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(WeighinError, match=f"No space left.*--resume {tmp_path}"):
            journal.append({"event": "b"})
    journal.close()
    assert list(read(tmp_path)) == [{"event": "a"}]


def test_a_write_that_the_system_cuts_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.write
    journal = Journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: really(fd, data[:3]))
        journal.append({"event": "a", "text": "long enough"})
    journal.close()
    assert list(read(tmp_path)) == [{"event": "a", "text": "long enough"}]
