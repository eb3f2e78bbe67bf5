"""Command lines, generated: every option with values that are right, odd or hostile.

Nothing in them leaves the folder in which the commands run: files to write are named from a list.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

# One entry per option; the last strategy of each is mixed with any text at all.
ANY_TEXT = st.text(st.characters(exclude_characters="\0"), max_size=12)
NUMBERS = st.one_of(
    st.integers(-3, 40).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["", "1e3", "0x10", "1_000", "1,000", "١٢", "٣", " 4 ", "+2", "--", "-", "9" * 5000, "½"]
    ),
)
UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "EiB", "kb", "GB", "%", "gib", "", " GiB", "iB", "bits", "٪"]
SIZES = st.one_of(
    st.builds(lambda number, unit: f"{number}{unit}", NUMBERS, st.sampled_from(UNITS)),
    st.sampled_from(
        ["80%", "24GiB", "100%", "101%", "0%", ".5GiB", "1.GiB", "1..5GB", "NaN%", "inf GiB", "%"]
    ),
)
DEVICES = st.sampled_from([
    *("h100", "a100-40gb", "H100 SXM 80GB", "NVIDIA GeForce RTX 4090", "v100", "mi300x", "cpu", "CPU ", "t4"),
    *("cuda", "cuda:0", "cuda:99", "cuda:-1", "cuda:x", "mps", "mps:0", "tpu", "a100", "nvidia", "gpu", ""),
    *("device.json", "broken.json", "none.json", "./folder", "~", "~nouser/x.json", "/dev/null", "/"),
    *("h100\n", "h100 ", "h-1-0-0", "100", "x" * 5000, "../device.json", "\ud800", "\x1b[31m", "[bold]"),
])  # fmt: skip
TARGETS = st.sampled_from([
    *("step.py:build",) * 12,
    *("step.py:with_arguments",) * 6,
    *("gpt2-tiny", "resnet-18", "vit-tiny", "llama-tiny", "bert-tiny", "gpt2", "GPT2", "gtp2", "llama-3-8b"),
    *("step.py", "step.py:", "step.py:missing", "step.py:NUMBER", "step.py:Class", "step.py:build:build"),
    *(":build", ":", "", " ", "none.py:build", "folder:build", "folder/:build", "step:build", "os:getcwd"),
    *("os.path:join", "json:loads", "hf:", "hf:none", "hf:folder", "hf:broken.json", "graph.json"),
    *("plan.json", "step.py:with.dot", "step.py:1x", "ünï.py:build", "a..b:c", ".:x", "builtins:print"),
    *("x" * 5000, "\ud800:x", "[red]:x", "step.py:generator", "step.py:coroutine", "step.py:needs", "\n:x"),
    *("step.py:__name__", "step.py:raises", "step.py:exits", "this:s", "~/x.py:build", "hf:~nouser", "-:x"),
])  # fmt: skip
ASSIGNMENTS = st.one_of(
    st.builds(
        lambda name, value: f"{name}={value}",
        st.sampled_from([
            *("layers", "heads", "width", "hidden", "hidden-size", "vocab_size", "context", "classes"),
            *("count", "rate", "name", "flag", "pair", "either", "choice", "anything", "batch", "device"),
            *("", " ", "a.b", "1", "ü", "*", "self", "class", "__class__", "set", "layers "),
        ]),
        st.one_of(
            NUMBERS,
            ANY_TEXT,
            st.sampled_from([
                *("true", "False", "none", "null", "None", "[1, 2]", "(1, 2)", "{}", '{"a": 1}', "'x'"),
                *("1" * 5000, "[" * 2000, "(" * 300, "-" * 2000 + "1", "1+1", "'\\d'", "NaN", "1e999"),
                *("[1,[2,[3]]]", "{1, 2}", "b'x'", "1j", "...", "=", "a=b", "__import__('os')", "\ud800"),
            ]),
        ),
    ),
    ANY_TEXT,
)  # fmt: skip
WRITTEN = st.sampled_from([
    *("result.json", "-", "", " ", ".", "folder", "folder/x.json", "none/x.json", "/dev/null", "/dev/full"),
    *("x" * 300, "ü.json", "\ud800.json", "step.py/x", "--json", "a\nb.json", "[red].json", "link.json"),
])  # fmt: skip
FOLDERS = st.sampled_from([
    *("tables", "folder", "", "-", " ", ".", "step.py", "none/x", "step.py/x", "/dev/null", "x" * 300),
    *("\ud800", "link.json", "a\nb", "[red]"),
])  # fmt: skip
COMPARED = st.sampled_from([
    *("old.json", "old.json", "new.json", "new.json", "old-trace.json", "new-trace.json", "planned.json"),
    *("plan.json", "broken.json", "device.json", "none.json", "folder", "", "/dev/null", "-", "x" * 300),
    *("\ud800", "[red]", "step.py", "graph.json"),
])  # fmt: skip
PLANS = st.sampled_from(
    ["plan.json", "broken.json", "device.json", "none.json", "folder", "", "/dev/null", "-"]
)
WORDS = st.one_of(
    st.sampled_from(
        ["roofline", "measured", "Roofline", "fp32", "bf16", "bf16-autocast", "fp16-autocast", "fp8"]
    ),
    st.sampled_from(
        ["adamw", "adamw-fused", "adamw-for-loop", "sgd", "none", "lion", "causal-lm", "regions"]
    ),
    st.sampled_from(["modules", "joint", "eager", "", " ", "\ud800", "x" * 2000, "[bold]", "%s", "{0}"]),
)
UNIT_NAMES = st.sampled_from([
    *("0", "*", "1", "blocks.*", "0.*", "*.*", "", ".", "..", "Sequential", "Sequential.0", "[", "**", "-1"),
])  # fmt: skip

COUNTS = st.one_of(
    st.builds(
        lambda number, unit: f"{number}{unit}", NUMBERS, st.sampled_from(["", "k", "M", "B", "T", "x"])
    ),
    st.sampled_from(["10B", "1.2M", "1.5", "0", "1e9", "B", " 3 k", "1.0000001M"]),
)
DEVICE_LISTS = st.one_of(
    DEVICES,
    st.sampled_from(["h100,a100-40gb", "h100,h100", "h100,", ",", "l4, t4", "all,h100", "device.json,t4"]),
)
PRICES = st.one_of(
    st.builds(lambda name, price: f"{name}={price}", DEVICES, NUMBERS),
    st.sampled_from(
        ["h100=2.99/h", "h100=2.99/d", "=1", "h100=", "h100", "h100=1=2", "l4=-1", "l4=0", "l4=inf"]
    ),
)
PRICE_FILES = st.sampled_from(
    ["prices.toml", "broken.json", "device.json", "none.toml", "folder", "", "/dev/null", "-", "~nouser/x"]
)
GRIDS = st.sampled_from(
    ["grid.toml"] * 3
    + ["bad.toml", "prices.toml", "none.toml", "folder", "", "/dev/null", "-", "step.py", "x" * 300, "\ud800"]
)
TABLES = st.sampled_from(
    ["table.csv", "table.parquet", "table.txt", "", "-", "folder", "none/x.csv", "x" * 300 + ".csv", "a.CSV"]
)

LISTS = NUMBERS | st.sampled_from(["max", "1,2", "2,max", "1,", ",", "1,1", "MAX", "1,-1", "1,2,3,x", "1;2"])
_STEP = {
    "--batch": NUMBERS,
    "--seq": NUMBERS,
    "--image-size": NUMBERS,
    "--dtype": WORDS,
    "--optimizer": WORDS,
    "--set": ASSIGNMENTS,
    "--task": WORDS,
    "--json": WRITTEN,
    "--csv": FOLDERS,
    "--report": WRITTEN,
}
ALLOCATORS = WORDS | st.sampled_from(
    [
        "default",
        "expandable",
        "none",
        "expandable_segments:True",
        "max_split_size_mb:",
        "max_split_size_mb:64,",
        "a:b",
    ]
)
_CAPTURED = _STEP | {"--steps": NUMBERS}
MESHES = st.sampled_from(["dp=2", "dp=2,tp=2", "tp=2,dp=2", "pp=2", "dp=0", "dp", "", "zp=2", "dp=2,dp=2"])
SPEEDS = st.sampled_from(["50GB/s", "400Gbit/s", "50Gb/s", "0GB/s", "GB/s", "fast", ""])
_CLUSTER = {
    "--world-size": NUMBERS,
    "--mesh": MESHES,
    "--rank": NUMBERS,
    "--gpus-per-node": NUMBERS,
    "--network": SPEEDS,
}
WORLD_SIZES = NUMBERS | st.sampled_from(
    ["8..64", "2,4", "8", "8..", "..8", "64..8", "1..1", "8,8", "8,", "0", "1..99999999", "8...64", "3..7"]
)
GLOBAL_BATCHES = COUNTS | st.sampled_from(
    ["512", "4Mi tokens", "4M tokens", "512 sequences", "tokens", "0 tokens", "1Ki", "8 cats", "7 tokens"]
)
DIMENSION_LISTS = st.sampled_from(
    ["fsdp", "dp,tp", "fsdp,tp,cp,pp", "replicate", "ep", "", ",", "tp,tp", "x"]
)
_SHOWN = {"--snapshot": WRITTEN, "--perfetto": WRITTEN}
_COSTS = {"--device": DEVICES, "--costs": WORDS, "--allocator": ALLOCATORS}
_LISTED = {
    "--batch": LISTS,
    "--device": DEVICES
    | st.sampled_from(["h100,t4", "h100,", "t4,t4", ",", "cpu,nothing", "t4,device.json"]),
}
_SIZE = {"--with-plan": None, "--budget": SIZES, "--multiple-of": NUMBERS, "--seconds": NUMBERS}
_COMPILED = {"--compile": None, "--compile-mode": WORDS, "--compile-backend": WORDS}
COMMANDS: dict[str, dict[str, st.SearchStrategy[str] | None]] = {
    "estimate": {
        **_CAPTURED,
        **_COSTS,
        **_CLUSTER,
        **_SHOWN,
        **_LISTED,
        **_COMPILED,
        "--refresh": None,
        "--save-trace": WRITTEN,
    },
    "plan": {
        **_SHOWN,
        **_CAPTURED,
        **_COSTS,
        **_CLUSTER,
        **_LISTED,
        **_COMPILED,
        "--budget": SIZES,
        "--seconds": NUMBERS,
        "--solver": WORDS,
        "--ac-unit": UNIT_NAMES,
        "--fsdp-unit": UNIT_NAMES,
        "--offload": None,
        "--output": WRITTEN,
        "--refresh": None,
    },
    "fit": {
        **_STEP,
        "--device": DEVICES,
        "--allocator": ALLOCATORS,
        "--budget": SIZES,
        "--seconds": NUMBERS,
        "--keep-numerics": None,
        "--mesh": MESHES,
        "--gpus-per-node": NUMBERS,
        "--network": SPEEDS,
        "--output": WRITTEN,
    },
    "frontier": {
        **_CAPTURED,
        **_COSTS,
        **_CLUSTER,
        "--points": NUMBERS,
        "--offload": None,
        "--refresh": None,
    },
    "max-batch": {**_CAPTURED, **_COSTS, **_CLUSTER, **_SIZE, "--refresh": None},
    "max-seq": {**_CAPTURED, **_COSTS, **_CLUSTER, **_SIZE, "--refresh": None},
    "verify": {
        **_CAPTURED,
        **_COMPILED,
        "--budget": SIZES,
        "--mesh": MESHES,
        "--plan": PLANS,
        "--way": PLANS,
        "--costs": WORDS,
        "--refresh": None,
        "--runs": NUMBERS,
        "--force": None,
        "--eager": None,
    },
    "order": {**_STEP, "--graph": WORDS, "--seconds": NUMBERS},
    "calibrate": {
        "--device": DEVICES,
        "--output": WRITTEN,
        "--minutes": NUMBERS,
        "--json": WRITTEN,
        "--csv": FOLDERS,
        "--report": WRITTEN,
    },
    "diff": {
        "--max-peak": SIZES,
        "--max-time": SIZES,
        "--device": DEVICES,
        "--json": WRITTEN,
        "--csv": FOLDERS,
        "--report": WRITTEN,
    },
    "compare": {
        **_CAPTURED,
        **_CLUSTER,
        "--devices": DEVICE_LISTS,
        "--allocator": ALLOCATORS,
        "--seconds": NUMBERS,
        "--tokens": COUNTS,
        "--epochs": NUMBERS,
        "--samples": COUNTS,
        "--price": PRICES,
        "--prices": PRICE_FILES,
    },
    "shard": {
        **_STEP,
        **_CLUSTER,
        "--device": DEVICES,
        "--allocator": ALLOCATORS,
        "--budget": SIZES,
        "--seconds": NUMBERS,
        "--output": WRITTEN,
    },
    "scale": {
        **_STEP,
        "--device": DEVICES,
        "--allocator": ALLOCATORS,
        "--budget": SIZES,
        "--seconds": NUMBERS,
        "--world-sizes": WORLD_SIZES,
        "--global-batch": GLOBAL_BATCHES,
        "--dimensions": DIMENSION_LISTS,
        "--gpus-per-node": NUMBERS,
        "--network": SPEEDS,
        "--confirm": WORDS,
    },
    "sweep": {
        "--output": TABLES,
        "--jobs": NUMBERS,
        "--ray": None,
        "--ray-address": WORDS,
        "--fresh": None,
        "--json": WRITTEN,
        "--csv": FOLDERS,
    },
    "devices": {},
}
for _name in ("shard", "scale"):
    del COMMANDS[_name]["--report"]  # they have no page
for _options in COMMANDS.values():
    _options |= {"--quiet": None, "--verbose": None}
"""Every option of every command, with what may follow it; None follows a flag."""

_WRITES = ("--json", "--save-trace", "--output", "-o", "--csv", "--report", "--snapshot", "--perfetto")
_NEVER_TRIED = frozenset(["--compile"])
"""Compiling takes minutes for built-in models; tests/compiling has its mistakes."""
_NOT_AT_RANDOM = (*_WRITES, "--device", "--plan", "--devices", "--price", "--prices", "--ray-address")


@dataclass(frozen=True)
class CommandLine:
    """What is typed after `trainfit`; `real` if nothing of it is replaced by something quicker."""

    words: tuple[str, ...]
    json: str | None
    """Where the result has to be found as JSON."""
    real: bool

    def __repr__(self) -> str:
        """Show it as one would type it."""
        return f"trainfit {shlex.join(self.words)}{' (real)' if self.real else ''}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it so in a failure as well: hypothesis would write all fields."""
        printer.text(repr(self))


@st.composite
def command_lines(draw: st.DrawFn) -> CommandLine:
    """Draw a command line: a command, its target, and up to four of its options."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    if command == "devices":
        names = draw(st.lists(st.one_of(DEVICES, ANY_TEXT), max_size=2))
        return CommandLine((command, *names), None, real=False)
    options = COMMANDS[command]
    target = draw(st.one_of(TARGETS, TARGETS, TARGETS, ANY_TEXT.filter(lambda text: ":" not in text)))
    # This machine has nothing to be asked about a step.
    words = [command] if command == "calibrate" else [command, target]
    if command == "diff":
        words = [command, draw(COMPARED), draw(COMPARED)]
    elif command == "sweep":
        words = [command, draw(GRIDS)]
    elif "--device" in options and draw(st.booleans()):
        words += ["--device", "cpu" if command == "calibrate" else "h100"]
    json = None
    for name in draw(st.lists(st.sampled_from(sorted(options.keys() - _NEVER_TRIED)), max_size=4)):
        values = options[name]
        words.append(name)
        if values is not None:
            # Any text as the name of a file might be one outside of the folder.
            words.append(draw(values if name in _NOT_AT_RANDOM else st.one_of(values, values, ANY_TEXT)))
        if name == "--json":
            json = words[-1]
    if draw(st.sampled_from((False, False, False, False, True))):
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from(STRAY_WORDS)))
        json = None
    # The built-in models are too large to be run for every input.
    # A sweep would start processes for every input.
    real = command != "sweep" and target.startswith("step.py") and draw(st.integers(0, 9)) == 9
    return CommandLine(tuple(words), json, real)


STRAY_WORDS = ("--nothing", "-x", "--", "-h", "--version", "extra", "", "--batch=", "--set=", "-o", "\ud800")
