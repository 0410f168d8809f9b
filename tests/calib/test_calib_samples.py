"""The samples CSV: what is written comes back, byte for byte; what cannot be true is refused by place and remedy."""

import gzip
import hashlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import calib.samples
from calib.samples import (
    COLUMNS,
    COPY_OPS,
    FASTEST_BYTES_PER_S,
    OPS,
    TOKEN_OPS,
    Sample,
    fault_of,
    read_comments,
    read_samples,
    samples_sha256,
    write_samples,
)
from calib.terms import load_models
from sim.errors import UserError

# -- round trip ------------------------------------------------------------------------------------------------------

paths = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=20)
counts = st.integers(1, 10**9)


@st.composite
def samples_of_any_kind(draw):
    op = draw(st.sampled_from(sorted(OPS)))
    latency_s = draw(st.floats(1e-7, 600.0))
    fields = {
        "spread_s": draw(st.floats(0.0, 1e3)),
        "repeats": draw(counts),
        "model": draw(paths if op in TOKEN_OPS else st.just("") | paths),
        "tp": draw(st.integers(2 if op == "all_reduce" else 1, 64)),
        "num_layers": draw(counts),
        "batch_size": draw(counts),
        "new_tokens": draw(st.integers(1 if op in TOKEN_OPS else 0, 10**9)),
        "context_tokens": draw(st.integers(0, 10**9)),
        "num_bytes": draw(st.floats(1e-300, latency_s * FASTEST_BYTES_PER_S)) if op in COPY_OPS else 0.0,
        "num_copies": draw(counts),
        "memory": draw(st.sampled_from(["pinned", "pageable"])),
        "beside": draw(st.just("") | st.sampled_from(sorted(OPS))),
        "graph": draw(st.integers(0, 2)),
        "dtype_bytes": draw(st.sampled_from([0.0, 1.0, 2.0, 4.0])),
    }
    return Sample(op=op, latency_s=latency_s, **fields)


@settings(max_examples=20, deadline=None)
@given(
    samples=st.lists(samples_of_any_kind(), min_size=1, max_size=5),
    suffix=st.sampled_from([".csv", ".csv.gz"]),
    comments=st.lists(st.text(st.characters(categories=("L", "N", "P", "S")), max_size=20), max_size=3),
)
def test_what_is_written_comes_back_and_is_written_again_to_the_same_bytes(tmp_path_factory, samples, suffix, comments):
    assert [fault_of(sample) for sample in samples] == [""] * len(samples)
    folder = tmp_path_factory.mktemp("samples")
    first, second = folder / f"a{suffix}", folder / f"b{suffix}"
    write_samples(first, samples, comments)
    assert read_samples(first) == samples
    write_samples(second, read_samples(first), comments)
    assert second.read_bytes() == first.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [first.name, second.name]


def test_a_written_file_is_a_csv_of_all_columns_under_its_comments(tmp_path):
    path = tmp_path / "s.csv"
    samples = [Sample(op="h2d", latency_s=0.5, num_bytes=1e9), Sample(op="layers", latency_s=0.25, model="m,n")]
    write_samples(path, samples, ["device: H200: the second", "date: 2026-01-02"])
    assert path.read_text() == (
        "# device: H200: the second\n# date: 2026-01-02\n"
        "op,latency_s,spread_s,repeats,model,tp,num_layers,batch_size,new_tokens,context_tokens,decodes,"
        "decode_context_tokens,longest_context_tokens,num_bytes,num_copies,memory,beside,graph,quantization,"
        "kv_cache_dtype,dtype_bytes\n"
        "h2d,0.5,0.0,1,,1,1,1,0,0,0,0,0,1000000000.0,1,pinned,,0,,,0.0\n"
        'layers,0.25,0.0,1,"m,n",1,1,1,0,0,0,0,0,0.0,1,pinned,,0,,,0.0\n'
    )
    assert read_comments(path) == {"device": "H200: the second", "date": "2026-01-02"}


def test_gzip_changes_neither_samples_nor_their_hash(tmp_path):
    plain, packed = tmp_path / "s.csv", tmp_path / "other.csv.gz"
    samples = [Sample(op="launch", latency_s=1e-5)]
    for path in (plain, packed):
        write_samples(path, samples, ["a: b"])
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    # Four bytes that hold a date in other gzip files.
    assert packed.read_bytes()[4:8] == bytes(4)
    assert read_samples(packed) == samples
    assert read_comments(packed) == {"a": "b"}
    assert samples_sha256(packed) == samples_sha256(plain) == hashlib.sha256(plain.read_bytes()).hexdigest()


def test_a_file_by_hand_may_leave_out_columns_and_hold_comments_blanks_and_windows_lines(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(
        b"\xef\xbb\xbf# mine: yes\r\n#without colon\r\n\r\n"
        b" latency_s , op,num_bytes,num_copies\r\n 1e-3,h2d,1e6,\r\n# in between\r\n\r\n2e-3, d2h ,2e6,4\r\n"
    )
    assert read_samples(path) == [
        Sample(op="h2d", latency_s=1e-3, num_bytes=1e6),
        Sample(op="d2h", latency_s=2e-3, num_bytes=2e6, num_copies=4),
    ]
    assert read_comments(path) == {"mine": "yes"}


# -- refusals --------------------------------------------------------------------------------------------------------

HEADER = "op,latency_s,model,new_tokens,tp,num_bytes,memory,beside,graph,batch_size"
GOOD = "layers,0.001,llama-2-7b,128,1,0,pinned,,0,1"
BAD_CELLS = [
    # column, cell, what the message must hold beside file, line, column and value
    ("latency_s", "700", ["over 600 s", "milliseconds?", "give seconds"]),
    ("latency_s", "5e-9", ["below 1e-07 s", "which unit", "give seconds"]),
    ("latency_s", "1,5", ["11 values for 10 columns", "one for each"]),
    ("new_tokens", "0", ["op 'layers' computes tokens", "give 1 or more"]),
    ("op", "layer", ["'layer' is not known", "use one of layers, products"]),
    ("op", '"layers', ["not CSV", "correct the line"]),
]


def with_cell(column, cell, row=GOOD):
    cells = row.split(",")
    cells[HEADER.split(",").index(column)] = cell
    return ",".join(cells)


def refusal(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_samples(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("column", "cell", "parts"), BAD_CELLS)
def test_a_bad_cell_is_named_with_line_column_and_remedy(tmp_path, column, cell, parts):
    # The comment and the blank line count: 5 is where an editor shows the row.
    message = refusal(tmp_path / "bad.csv", f"# note\n\n{HEADER}\n{GOOD}\n{with_cell(column, cell)}\n{GOOD}\n")
    assert message.startswith("line 5: ")
    if "values for" not in message and "not CSV" not in message:
        assert column in message
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("h2d,1e-6,,0,1,1e9,pinned,,0,1", ["num_bytes = 1e+09 in 1e-06 s is 1e+15 B/s", "is a unit wrong?"]),
        ("d2h,1e-3,,0,1,0,pinned,,0,1", ["num_bytes = 0.0, but op 'd2h' moves bytes", "more than 0"]),
        ("all_reduce,1e-3,,0,1,1e6,pinned,,0,1", ["tp = 1", "2 GPUs or more", "how many took part"]),
        ("restore,1e-3,llama-2-7b,0,1,0,pinned,,0,1", ["new_tokens = 0", "'restore' computes tokens"]),
    ],
)
def test_a_row_against_its_op_or_physics_is_named(tmp_path, row, parts):
    message = refusal(tmp_path / "bad.csv", f"{HEADER}\n{GOOD}\n{row}\n")
    assert message.startswith("line 3: ")
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["holds no header", "op, latency_s"]),
        (f"# note\n{HEADER}\n", ["holds no samples below its header", "give measurements"]),
        (HEADER.replace("tp", "tensor") + "\n" + GOOD, ["line 1", "column 'tensor' is not known", "known are op,"]),
        (HEADER.replace("tp", "op") + "\n" + GOOD, ["line 1", "column 'op' appears twice", "keep one"]),
        (HEADER.replace("latency_s", "spread_s") + "\n" + GOOD, ["line 1", "'latency_s' is missing", "seconds"]),
        (f"{HEADER}\n{GOOD}\nlayers,0.001\n", ["line 3", "2 values for 10 columns", "one for each"]),
        (b"op,latency_s\nlayers,\xff\n", ["not UTF-8 text (byte 20)", "give a CSV file"]),
        (gzip.compress(b"op,latency_s\nlaunch,1e-5\n", mtime=0)[:-9], ["cannot be read", "check the path"]),
    ],
)
def test_a_file_that_is_no_samples_file_is_named(tmp_path, text, parts):
    message = refusal(tmp_path / "bad.csv", text)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("place", ["absent.csv", "."])
def test_a_path_that_cannot_be_read_is_named(tmp_path, place):
    with pytest.raises(UserError, match=r"cannot be read \(.+\): check the path"):
        read_samples(tmp_path / place)


cells = st.text(max_size=12) | st.sampled_from(["nan", "-inf", "1e999", "0x10", '"', "#", "1_0", "٣", "\0", ","])


@settings(max_examples=50, deadline=None)
@given(
    row=st.integers(0, 3), column=st.integers(0, 9), cell=cells, cut=st.integers(0, 400) | st.none(), junk=st.binary()
)
def test_any_damage_ends_in_samples_or_one_line_naming_the_file(tmp_path_factory, row, column, cell, cut, junk):
    lines = [HEADER.split(","), *(GOOD.split(",") for _ in range(3))]
    lines[row][column] = cell
    data = "\n".join(",".join(line) for line in lines).encode()
    if cut is not None:
        data = data[:cut] + junk + data[cut:]
    path = tmp_path_factory.mktemp("damage") / "bad.csv"
    path.write_bytes(data)
    try:
        samples = read_samples(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert all(fault_of(sample) == "" for sample in samples)


# -- models of samples -----------------------------------------------------------------------------------------------


def test_models_are_built_in_names_or_paths_seen_from_the_file(tmp_path, monkeypatch):
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    config.write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, '
        '"num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 128, '
        '"tie_word_embeddings": false, "torch_dtype": "float16"}'
    )
    # A folder of a built-in model's name does not hide the model.
    (tmp_path / "llama-2-7b").mkdir()
    samples = [Sample(op="layers", latency_s=1.0, model=name) for name in ("mine/config.json", "llama-2-7b")]
    found = load_models([*samples, Sample(op="h2d", latency_s=1.0)], tmp_path)
    assert sorted(found) == ["llama-2-7b", "mine/config.json"]
    assert found["mine/config.json"].hidden_size == 256
    assert found["llama-2-7b"].hidden_size == 4096


def test_an_unknown_model_is_refused_with_the_nearest_right_one(tmp_path):
    with pytest.raises(UserError, match=r"'lama-2-7b'.*did you mean 'llama-2-7b'"):
        load_models([Sample(op="layers", latency_s=1.0, model="lama-2-7b")], tmp_path)


def test_the_columns_are_documented_in_their_order():
    documented = re.findall(r"^\| `(\w+)` \|", calib.samples.__doc__ or "", flags=re.MULTILINE)
    assert tuple(documented) == COLUMNS


@pytest.mark.parametrize(
    ("shape", "mean"),
    [
        ({"new_tokens": 1, "context_tokens": 100, "batch_size": 8}, 100),
        ({"new_tokens": 64, "decodes": 8, "decode_context_tokens": 100}, 100),
        ({"new_tokens": 64, "context_tokens": 100}, None),
    ],
)
def test_the_longest_context_is_of_decodes_and_no_shorter_than_their_mean(shape, mean):
    told = [
        fault_of(Sample(op="products", latency_s=1e-3, model="m", longest_context_tokens=n, **shape)) for n in (99, 100)
    ]
    assert told[0].startswith("longest_context_tokens = 99, but decodes have 100 in the mean: give the longest, or 0")
    assert bool(told[1]) == (mean is None)
