"""What is read does not depend on the way of reading; stamps, shared ids and blocks by hand."""

import contextlib
from itertools import accumulate, product
from math import inf

import pytest
from odd_traces import HEADERS, NAMED, ROWS, TIMES, TOKENS, USUAL, files, lax, read, text_of

from traces import files as trace_files
from traces.csv_reader import CsvReader
from traces.hash_ids import hashes_fit, num_shared, output_blocks, output_hashes_fit
from traces.jsonl_reader import JsonlReader
from traces.stamps import StampClock


def every_file():
    """Text and options."""
    for name in ROWS:
        for _, data in files(name):
            yield data, lax(name)
        for field, values in enumerate((TIMES, TOKENS, TOKENS)):
            for value in values:
                rows = [list(row) for row in USUAL]
                rows[-1][field] = value
                yield text_of(name, rows), lax(name) | {"zero_tokens": ("error", "drop", "one")[field]}
    for prompt, output, *cells in NAMED:
        yield f"{HEADERS['kvtwin']}\n" + f"0,{prompt},{output},s,{','.join(cells)}\n" * 3, {"hash_block_tokens": 16}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("read")):
        return [read(data, **options) for data, options in every_file()]


@pytest.mark.parametrize("how", ["row by row", 1, 64])
def test_the_way_of_reading_changes_nothing(how, expected, tmp_path, monkeypatch):
    """Blocks of as many characters; a word of what is wrong, and in which line, included."""
    monkeypatch.chdir(tmp_path)
    if how == "row by row":
        for reader in (CsvReader, JsonlReader):
            monkeypatch.setattr(reader, "fast", lambda *_: int(""))
    else:
        monkeypatch.setattr(trace_files.text_blocks, "__defaults__", (how,))
        monkeypatch.setattr(trace_files, "BLOCK_CHARS", how)
    assert [read(data, **options) for data, options in every_file()] == expected


def test_shared_ids_are_counted_as_one_by_one():
    right = (1, 2, 3, 4, 5, 6, 7)
    for at in range(3):
        for begin, end in ((0, 7), (2, 7), (2, 4), (3, 3)):
            for wrong in range(8):
                left = tuple(ident if i != wrong else 0 for i, ident in enumerate(right[begin : begin + 5]))
                left = (9,) * at + left
                pairs = zip(left[at:], right[begin:end], strict=False)
                same = sum(accumulate((a == b for a, b in pairs), min))
                assert num_shared(left, at, right, begin, end) == same, (left, at, begin, end)


def test_blocks_that_an_answer_reaches_are_those_after_the_prompts():
    for prompt in range(1, 12):
        for output in range(1, 12):
            blocks = {token // 4 for token in range(prompt, prompt + output)} - {token // 4 for token in range(prompt)}
            assert output_blocks(prompt, output, 4) == len(blocks)


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2023-11-16 00:00:00", 0.0),
        ("2023-11-16T01:02:03.0000001Z", 3723.0000001),
        ("2023-11-16 23:59:59.9999999 UTC", 86399.9999999),
        ("2023-11-17 00:00:00+00:00", 86400.0),
        ("2023-11-16 02:30:00+02:30", 0.0),
        ("2023-11-15 21:30:00 -0230", 0.0),
        ("2024-03-01 00:00:00", (14 + 31 + 31 + 29 + 1) * 86400.0),
        ("2023-11-16 00:00:60", None),
        ("2023-11-16 00:60:00", None),
        ("2023-11-16 00:00:00.1234567890", None),
        ("2023-11-16 00:00:00+2", None),
    ],
)
def test_stamps_are_exact(stamp, seconds):
    clock = StampClock()
    zero = clock.tick("2023-11-16 00:00:00")
    if seconds is None:
        with pytest.raises(ValueError, match=r".*"):
            clock.tick(stamp)
    else:
        assert (clock.tick(stamp) - zero) / 1e7 == seconds


def test_stamps_beyond_a_minute_are_refused_all_together():
    clock = StampClock()
    first, last = clock.ticks(["2023-11-16 00:00:00", "2023-11-16 00:01:59.5"])
    assert last - first == 119.5 * 1e7
    for seconds in ("60", "-1", "nan", str(inf)):
        with pytest.raises(ValueError, match=r".*"):
            clock.ticks([f"2023-11-16 00:00:{seconds}"])


def test_ids_fit_that_name_every_full_block():
    for block, prompt, output, named, more in product((1, 2, 3), range(1, 8), range(1, 6), range(9), range(1, 8)):
        full, begun = prompt // block, len({token // block for token in range(prompt)})
        assert hashes_fit(prompt, (7,) * named, block) == (named in (0, full, begun))
        # The block of the last token of all may go without a name.
        after = len({token // block for token in range(prompt + output)}) - begun
        fits = named == begun and more in (after, after - 1)
        assert output_hashes_fit(prompt, output, (7,) * named, block, (8,) * more) == fits
    assert hashes_fit(5, (), 0) and not hashes_fit(5, (1,), 0)
    assert output_hashes_fit(5, 5, (), 0, ()) and not output_hashes_fit(5, 5, (1,), 0, (2,))
