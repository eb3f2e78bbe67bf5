"""Traces on disk: what was saved comes back, and whatever else a file holds is one clear error."""

from __future__ import annotations

import ast
import copy
import errno
import gzip
import hashlib
import json
import math
import os
import pickle
import stat
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_text import trace

from trainfit.basics import decoding, sealed_files
from trainfit.errors import FileFormatError
from trainfit.traces import trace_store as store
from trainfit.traces.assumptions import Assumption
from trainfit.traces.settings import Settings
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace, save_trace

TRACE = replace(
    trace("""
        w              : 100 held parameter @Net.a
        a = mm(w)      : 400 saved workspace 64 @Net.a
        y = sum(a)     :   4 output         @Net
        -- backward
        g = back(a, y) : 100 gradient for a @Net.a
        g -> 120
        -- optimizer
        w += step(g)
    """),
    settings=Settings(
        8, 16, None, "fp32", "adamw", "AdamW", "foreach", "causal-lm", 25, 25, 2, "Net", (("layers", "1"),)
    ),
    assumptions=(Assumption("value", "an assumption", "(train.py:3)"),),
)
SCHEMA = f'"schema": {store.FILE.schema}'.encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.trace"


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compress whatever is saved."""
    monkeypatch.setattr(store, "COMPRESS_ABOVE_BYTES", 0)


def refused(path: str | Path) -> str:
    """Return the message of the one error that reading the file raises."""
    with pytest.raises(FileFormatError) as raised:
        load_trace(path)
    error = raised.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    message = str(error)
    assert message.startswith((f"{path} ", f"cannot read {path}: "))
    assert message.endswith(".") and "\n" not in message
    assert len(message) < len(str(path)) + 320
    return message


def canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def sealed(content: Any, **head: Any) -> bytes:
    """Return a file whose hash is right, whatever its content."""
    digest = hashlib.sha256(canonical(content)).hexdigest()
    document = {"format": "trainfit-trace", "schema": store.FILE.schema, "sha256": digest} | head
    return json.dumps(document | {"trace": content}).encode()


def content_hash(saved: Trace) -> str:
    """Return the hash that stands in a trace's file."""
    return str(store.FILE.head(store._content(saved))["sha256"])


def content_of(saved: Trace, path: Path) -> Any:
    save_trace(saved, path)
    return json.loads(path.read_bytes())["trace"]


# Round trips --------------------------------------------------------------------------------------------


def test_a_plain_file_comes_back(path: Path) -> None:
    save_trace(TRACE, path)
    assert load_trace(path) == TRACE
    assert load_trace(str(path)) == TRACE


@pytest.mark.usefixtures("compressed")
def test_a_compressed_file_comes_back(path: Path) -> None:
    save_trace(TRACE, path)
    assert path.read_bytes().startswith(b"\x1f\x8b")
    assert load_trace(path) == TRACE


def test_large_traces_are_compressed(path: Path) -> None:
    large = replace(TRACE, assumptions=(Assumption("value", "x" * (1 << 20)),))
    save_trace(large, path)
    assert path.stat().st_size < 10_000
    assert load_trace(path) == large


def test_an_empty_trace_comes_back(path: Path) -> None:
    empty = trace("")
    save_trace(empty, path)
    assert load_trace(path) == empty


@pytest.mark.parametrize("text", ["", "größer ✓ 𝕏", "a\nb\x00\x1b[31m", "</script>", '"\\', "\udcff", "NaN"])
def test_any_text_comes_back(path: Path, text: str) -> None:
    odd = replace(TRACE, target=text, assumptions=(Assumption("value", text or "x"),))
    save_trace(odd, path)
    assert load_trace(path) == odd


def test_the_file_says_what_it_is(path: Path) -> None:
    save_trace(TRACE, path)
    document = json.loads(path.read_bytes())
    assert list(document) == ["format", "schema", "sha256", "trace"]
    assert (document["format"], document["schema"]) == ("trainfit-trace", store.FILE.schema)
    assert document["sha256"] == content_hash(TRACE)
    assert path.read_bytes().endswith(b'"trace": ' + canonical(document["trace"]) + b"}\n")


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_the_same_trace_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(store, "COMPRESS_ABOVE_BYTES", limit)
    save_trace(TRACE, tmp_path / "one")
    save_trace(copy.deepcopy(TRACE), tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


# The content hash ---------------------------------------------------------------------------------------


def variations(value: Any) -> Iterator[Any]:
    """Yield copies of a value that differ from it in exactly one place, for every place."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for other in variations(getattr(value, field.name)):
                yield replace(value, **{field.name: other})
    elif isinstance(value, tuple):
        yield (*value, 7)
        for number, item in enumerate(value):
            for other in variations(item):
                yield (*value[:number], other, *value[number + 1 :])
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, str):
        yield value + "x"
    else:
        assert value is None
        yield 0


def test_the_hash_is_stable(path: Path) -> None:
    save_trace(TRACE, path)
    assert content_hash(TRACE) == content_hash(copy.deepcopy(TRACE)) == content_hash(load_trace(path))
    assert len(content_hash(TRACE)) == 64


def test_the_hash_tells_every_difference() -> None:
    others = [content_hash(other) for other in variations(TRACE)]
    assert len(others) > 200
    assert len({content_hash(TRACE), *others}) == 1 + len(others)


# Damage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["compressed", "plain"])
def test_a_truncated_file(path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(store, "COMPRESS_ABOVE_BYTES", limit)
    save_trace(TRACE, path)
    whole = path.read_bytes()
    last = len(whole) - 1  # without the newline at its end a plain file is still whole
    for length in (*range(0, last, 3), last - 1):
        path.write_bytes(whole[:length])
        assert "truncated" in refused(path)


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["compressed", "plain"])
def test_a_flipped_bit(path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(store, "COMPRESS_ABOVE_BYTES", limit)
    save_trace(TRACE, path)
    whole = path.read_bytes()
    harmless = []
    for position in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position * 5 % 8)
        path.write_bytes(flipped)
        try:
            assert load_trace(path) == TRACE
        except FileFormatError:
            continue
        harmless.append(position)  # gzip's time stamp, or the newline at the end of a plain file
    assert len(harmless) < 10


@pytest.mark.parametrize("tail", [b"x", b"\0", b"{}"])
@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["compressed", "plain"])
def test_something_behind_the_trace(
    path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, tail: bytes
) -> None:
    monkeypatch.setattr(store, "COMPRESS_ABOVE_BYTES", limit)
    save_trace(TRACE, path)
    path.write_bytes(path.read_bytes() + tail)
    refused(path)


def test_content_that_was_edited(path: Path) -> None:
    save_trace(TRACE, path)
    path.write_bytes(path.read_bytes().replace(b'"mm"', b'"xx"'))
    assert refused(path) == f"{path} is damaged: its content does not match its hash."


@pytest.mark.parametrize("digest", [None, "", 7, "0" * 64])
def test_a_hash_of_something_else(path: Path, digest: object) -> None:
    path.write_bytes(sealed(content_of(TRACE, path), sha256=digest))
    assert "does not match its hash" in refused(path)


# Files that are something else --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b" ", b"\0", b"hello", b"\xff\xfe\xfd", b"{", b"[1, 2", b"{'a': 1}", b"\x89PNG\r\n", b"{}{}"],
)
def test_a_file_that_is_not_json(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert refused(path) == f"{path} is truncated or not JSON."


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b"null",
        b"7",
        b'"trainfit-trace"',
        b'{"format": "other"}',
        b'{"format": ["trainfit-trace"]}',
    ],
)
def test_json_that_is_not_a_trace(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert refused(path) == f"{path} is not a trainfit trace."


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (store.FILE.schema - 1, f"schema {store.FILE.schema - 1}"),
        (store.FILE.schema + 1, f"schema {store.FILE.schema + 1}"),
        (0, "schema 0"),
        (None, "an unknown schema"),
        ("2", "an unknown schema"),
        (2.0, "an unknown schema"),
        (True, "an unknown schema"),
        (10**4000, "an unknown schema"),
        (["x" * 10_000], "an unknown schema"),
    ],
    ids=["1", "3", "0", "none", "text", "float", "bool", "huge", "long"],
)
def test_another_schema(path: Path, schema: object, named: str) -> None:
    path.write_bytes(sealed(content_of(TRACE, path), schema=schema))
    reads = f"this trainfit reads schema {store.FILE.schema}"
    assert f"{path} has {named}, but {reads}; {store.FILE.remedy}." == refused(path)


def test_a_broken_gzip_file(path: Path) -> None:
    path.write_bytes(b"\x1f\x8b" + b"not gzip at all")
    assert refused(path) == f"{path} is damaged: it cannot be decompressed."


def test_a_small_file_that_unpacks_to_a_huge_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a limit of 1 MiB and a bomb of 16 MiB, THEN no more than the limit is ever unpacked."""
    monkeypatch.setattr(sealed_files, "LARGEST_FILE_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b" " * (16 << 20)))
    tracemalloc.start()
    try:
        message = refused(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "unpacks to more than" in message and "it is not ours" in message
    assert peak < 4 << 20


def test_an_integer_that_is_infinite(path: Path) -> None:
    """1e999 is JSON, and Python reads it as infinity."""
    content = content_of(TRACE, path) | {"observed_peak_bytes": math.inf}
    path.write_bytes(sealed(content).replace(b"Infinity", b"1e999"))
    assert "observed_peak_bytes: expected a whole number, found inf" in refused(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_json(path: Path, number: str) -> None:
    path.write_bytes(sealed(content_of(TRACE, path)).replace(SCHEMA, b'"schema": ' + number.encode()))
    assert refused(path) == f"{path} is truncated or not JSON."


DEPTHS = (10, 100, *range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 20, 2), 100_000)


@pytest.mark.parametrize("place", ["everything", "schema", "sha256", "trace", "ops"])
def test_deep_nesting(path: Path, place: str) -> None:
    """The decoder, the encoder and repr() reach Python's limit at different depths; none may leak."""
    content = content_of(TRACE, path)
    for depth in DEPTHS:
        nest = b"[" * depth + b"]" * depth
        if place == "everything":
            path.write_bytes(nest)
        elif place == "ops":
            path.write_bytes(sealed(content | {"ops": "HERE"}).replace(b'"HERE"', nest))
        else:
            path.write_bytes(sealed("HERE", **{place: "HERE"}).replace(b'"HERE"', nest))
        refused(path)


def test_nesting_that_only_the_encoder_finds_too_deep(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.14 the limit is the size of the C stack, which the encoder may reach first."""

    def too_deep(content: Any) -> bytes:
        raise RecursionError("maximum recursion depth exceeded")

    save_trace(TRACE, path)
    monkeypatch.setattr(sealed_files, "canonical", too_deep)
    assert "does not match its hash" in refused(path)


# A right hash over wrong content ------------------------------------------------------------------------


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value within a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        for below in places(item):
            yield (key, *below)


def changed(content: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a JSON document with another value at one place."""
    made = copy.deepcopy(content)
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


@pytest.mark.parametrize("wrong", [1.0, "7", {"a": 1}, [[[]]]], ids=repr)
def test_a_value_of_the_wrong_type_anywhere(path: Path, wrong: object) -> None:
    content = content_of(TRACE, path)
    for place in places(content):
        previous = content
        for key in place:
            previous = previous[key]
        if type(previous) is not type(wrong):
            path.write_bytes(sealed(changed(content, place, wrong)))
            assert f"{path} is not a valid trace: " in refused(path)


def short_name(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else repr(value)[:30]


@pytest.mark.parametrize(
    ("place", "wrong", "reason"),
    [
        (("target",), 7, "target: expected text, found 7"),
        (("ops",), None, "ops: expected a list, found null"),
        (("ops", 0), {}, "ops[0]: the field 'signature' is missing"),
        (("ops", 0), [1, 2], "ops[0]: expected 16 values, found 2"),
        (("ops", 0, 0), True, "ops[0].signature: expected a whole number, found true"),
        (("ops", 0, 4), 0, "ops[0].recompute: expected true or false, found 0"),
        (("storages", 0, 0), 2**62 + 1, "storages[0].bytes: expected at most 62 bits, found 4611"),
        (("storages", 0, 0), 10**4000, "storages[0].bytes: expected at most 62 bits, found 1000"),
        (("storages", 0, 6), [[1, 2, 3]], "storages[0].resizes[0]: expected 2 values, found 3"),
        (("storages", 0, 5, 0, 0), "nobody", "storage 0: a holder is the program, autograd, a gradient or"),
        (("storages", 0, 1), "stuff", "storage 0: its category is one of the eight"),
        (("observed_peak_bytes",), 7, "the replay equals what the recorder saw (7)"),
        (("unknown",), 7, "there is no field unknown (they are target, device, torch, "),
    ],
    ids=short_name,
)
def test_the_message_says_what_is_wrong(
    path: Path, place: tuple[Any, ...], wrong: object, reason: str
) -> None:
    path.write_bytes(sealed(changed(content_of(TRACE, path), place, wrong)))
    message = refused(path)
    assert message.startswith(f"{path} is not a valid trace: ") and reason in message


def test_a_part_that_is_missing(path: Path) -> None:
    content = content_of(TRACE, path)
    for part in content:
        path.write_bytes(sealed({name: value for name, value in content.items() if name != part}))
        assert f"the field {part!r} is missing" in refused(path)


def test_an_integer_with_more_digits_than_python_reads(path: Path) -> None:
    path.write_bytes(sealed(content_of(TRACE, path)).replace(SCHEMA, b'"schema": ' + b"9" * 5000))
    assert refused(path) == f"{path} is truncated or not JSON."


def test_sizes_whose_sum_does_not_fit_64_bits(path: Path) -> None:
    content = content_of(TRACE, path)
    for number in range(3):
        content["storages"][number][0] = 2**62
    path.write_bytes(sealed(content))
    assert "all bytes can be counted in 64 bits" in refused(path)


VALUES = st.none() | st.booleans() | st.integers(-3, 12) | st.integers() | st.text(max_size=3)
JSON = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_value_changed_at_random(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Either the reader refuses the file, or what it returns can be used and saved."""
    path = tmp_path_factory.getbasetemp() / "random.trace"
    content = content_of(TRACE, path)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(content))))
        content = changed(content, place, data.draw(JSON))
    path.write_bytes(sealed(content))
    try:
        loaded = load_trace(path)
    except FileFormatError:
        return
    assert content_of(loaded, path) == content
    assert len(loaded.readers) == len(loaded.storages)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random.bytes"
    for start in (b"", b"\x1f\x8b\x08\x00", b'{"format": "trainfit-trace", "schema": 1, '):
        path.write_bytes(start + data)
        refused(path)


# Nothing is executed ------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
def test_a_pickle_is_not_opened(path: Path, pack: Callable[[bytes], bytes]) -> None:
    made = path.parent / "made"
    path.write_bytes(pack(pickle.dumps(Bomb(made))))
    refused(path)
    assert not made.exists()


def test_the_store_knows_no_way_to_execute_a_file() -> None:
    names = {
        name
        for module in (store, sealed_files, decoding)
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")))
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    assert {"json", "loads"} <= names
    assert not names & {"eval", "exec", "compile", "pickle", "marshal", "shelve", "yaml", "__import__"}


# Files that cannot be read or written -------------------------------------------------------------------


def test_a_missing_file(path: Path) -> None:
    assert refused(path) == f"cannot read {path}: No such file or directory."


def test_a_folder_instead_of_a_file(path: Path) -> None:
    path.mkdir()
    assert refused(path) == f"cannot read {path}: Is a directory."
    with pytest.raises(FileFormatError, match=r"cannot write .*: Is a directory\."):
        save_trace(TRACE, path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["a\0b", "\ud800"], ids=["null", "surrogate"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileFormatError, match="cannot read "):
        load_trace(tmp_path / name)
    with pytest.raises(FileFormatError, match="cannot write "):
        save_trace(TRACE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/step.trace", "file/step.trace"])
def test_a_folder_that_does_not_exist(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(FileFormatError) as error:
        save_trace(TRACE, tmp_path / name)
    assert str(error.value).startswith(f"cannot write {tmp_path / name}: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a folder that not even root can write")
def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(FileFormatError, match=r"cannot write /proc/step\.trace: .+\."):
        save_trace(TRACE, "/proc/step.trace")


class FullDisk:
    """A file that takes half of what is written and then fails."""

    def __init__(self, handle: int, failure: BaseException) -> None:
        self.handle = handle
        self.failure = failure

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def write(self, data: bytes) -> None:
        os.write(self.handle, data[: len(data) // 2])
        raise self.failure


@pytest.mark.parametrize("before", [None, b"what was there before"])
@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FileFormatError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full", "interrupted"],
)
def test_nothing_is_half_written(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    seen: type[BaseException],
    before: bytes | None,
) -> None:
    if before is not None:
        path.write_bytes(before)
    monkeypatch.setattr(sealed_files.os, "fdopen", lambda handle, mode: FullDisk(handle, failure))
    with pytest.raises(seen) as raised:
        save_trace(TRACE, path)
    if seen is FileFormatError:
        assert str(raised.value) == f"cannot write {path}: No space left on device."
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == ([] if before is None else [before])


def test_saving_replaces_what_was_there(path: Path) -> None:
    path.write_bytes(b"x" * 100_000)
    save_trace(TRACE, path)
    assert load_trace(path) == TRACE
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_path_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_trace(TRACE, "step.trace")
    assert load_trace("step.trace") == load_trace(tmp_path / "step.trace") == TRACE


def test_the_longest_possible_name(tmp_path: Path) -> None:
    save_trace(TRACE, tmp_path / ("n" * 255))
    assert load_trace(tmp_path / ("n" * 255)) == TRACE


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_bytes(b"old")
    link.symlink_to(file)
    save_trace(TRACE, link)
    assert link.is_symlink() and not file.is_symlink()
    assert load_trace(file) == TRACE


def test_a_pipe_is_written_to_and_not_replaced(path: Path) -> None:
    """As `/dev/stdout` or `/dev/null` must not become an ordinary file when root saves there."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save_trace(TRACE, path)
        received = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert path.is_fifo()
    assert json.loads(received)["sha256"] == content_hash(TRACE)
