"""Targets: every form loads and runs one real step, and every mistake has one clear message."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.errors import (
    MissingExtra,
    OptionError,
    SizeNotTaken,
    StepError,
    TargetError,
    UserCodeError,
)
from trainfit.models.catalog import PRESETS
from trainfit.models.recipe import StepOptions
from trainfit.targets import load

USER_STEP = """
import torch, trainfit

def build(batch=2, *, device="cpu"):
    model = torch.nn.Linear(4, 1)
    inputs = torch.ones(batch, 4, device=device)
    return trainfit.Step.of(model, inputs, loss=lambda output: output.sum())
"""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models this small lose more to waking threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, and take back what loading adds to the import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def message_of(error: type[Exception], target: str, task: str | None = None, **options: Any) -> str:
    """Load the target, which must fail with exactly this exception, and return what it says."""
    with pytest.raises(error) as raised:
        load(target, StepOptions(**options), task)
    assert type(raised.value) is error
    return str(raised.value)


# How targets are read


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "the target is empty; give file.py:function, package.module:function, hf:"),
        ("train.py", "'train.py' names a file but no function in it; add the one that returns the step"),
        ("train.py:", "'train.py:' needs the name of a function after the colon, as in train.py:build."),
        ("train.py:a.b", "needs the name of a function after the colon"),
        ("models/llama", "'models/llama' is a path; for a Hugging Face config write hf:models/llama."),
        ("config.json", "'config.json' is a path; for a Hugging Face config write hf:config.json."),
        ("no-such.mod:build", "'no-such.mod' is neither a file that ends in .py nor the dotted name"),
    ],
)
def test_unreadable_target(target: str, message: str) -> None:
    assert message in message_of(TargetError, target)


@pytest.mark.parametrize("target", ["gpt2-tiny", "user.py:build"])
def test_task_is_for_hf_only(target: str) -> None:
    write("user.py", USER_STEP)
    assert message_of(OptionError, target, task="causal-lm").startswith("--task applies to hf: targets only")


# Built-in models


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("-tiny")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-autocast", "fp16-autocast"])
def test_built_in_learns_its_batch(name: str, dtype: Any) -> None:
    torch.manual_seed(0)
    seq = 16 if PRESETS[name].seq else None
    target = load(name, StepOptions(batch=2, seq=seq, dtype=dtype))
    step = target.build()
    # Three, because with float16 the first may overflow: the scaler then skips it and lowers its scale.
    losses = [step.run().item() for _ in range(3)]
    assert (target.name, target.kind) == (name, "built-in")
    assert losses[-1] < losses[0]


def test_built_in_defaults_come_from_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("trainfit.targets.divided.training_step", lambda *arguments: asked.append(arguments))
    with FakeTensorMode():
        load("tinyllama-1.1b", StepOptions()).build()
    ((model, inputs, options),) = asked
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert inputs["tokens"].shape == (1, 2048)
    assert options.dtype == "bf16"


def test_built_in_builds_anew_each_time() -> None:
    target = load("gpt2-tiny", StepOptions())
    assert target.build().model is not target.build().model


def test_unknown_built_in_suggests_and_lists() -> None:
    message = message_of(TargetError, "gpt-2")
    assert "there is no built-in model 'gpt-2'. Did you mean gpt2" in message
    assert "llama    llama-tiny, tinyllama-1.1b, llama-2-7b, llama-3-8b" in message


def test_built_in_name_far_from_all_lists_without_suggesting() -> None:
    message = message_of(TargetError, "zzzzzz")
    assert "Did you mean" not in message
    assert "resnet   resnet-tiny, resnet-18, resnet-50" in message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"seq": 2048}, "--seq 2048 is longer than the 1024 positions that this model has"),
        ("bert-base", {"seq": 513}, "--seq 513 is longer than the 512 positions"),
        ("vit-b-16", {"image_size": 225}, "--image-size 225 is not a multiple of the patch size 16."),
        ("resnet-50", {"image_size": 32}, "--image-size 32 is too small for a ResNet; the least is 64."),
        ("resnet-50", {"seq": 8}, "--seq does not apply to resnet-50, which reads images"),
        ("gpt2", {"image_size": 64}, "--image-size does not apply to gpt2, which reads tokens"),
    ],
)
def test_built_in_refuses_sizes_it_cannot_take(name: str, options: Any, message: str) -> None:
    assert message in message_of(OptionError, name, **options)


def test_vit_takes_other_image_sizes() -> None:
    step = load("vit-tiny", StepOptions(batch=2, image_size=32)).build()
    assert step.model.get_parameter("position_embedding").shape[1] == 16 + 1
    assert step.run().numel() == 1


# Functions of the user's own


def test_file_target_runs() -> None:
    target = load(write("folder/user.py", USER_STEP) + ":build", StepOptions())
    assert (target.name, target.kind) == ("folder/user.py:build", "file")
    target.build().run()


def test_module_target_runs() -> None:
    write("package_of_test/__init__.py", "")
    write("package_of_test/steps.py", USER_STEP)
    target = load("package_of_test.steps:build", StepOptions())
    assert target.kind == "module"
    target.build().run()


def test_file_may_import_its_neighbour_and_define_dataclasses() -> None:
    write("folder/neighbour_of_test.py", "WIDTH = 4")
    text = (
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "import neighbour_of_test\n"
        "@dataclass\nclass Shape:\n    kind: ClassVar[str] = 'x'\n    width: int = neighbour_of_test.WIDTH\n"
    )
    load(write("folder/user.py", text + USER_STEP) + ":build", StepOptions()).build()


def test_loading_does_not_call_the_function() -> None:
    write("user.py", "def build():\n    raise ValueError('called')")
    load("user.py:build", StepOptions())


def test_options_given_reach_the_parameters_of_that_name() -> None:
    write("user.py", "calls = []\ndef build(batch=1, seq=1, device=None): calls.append((batch, seq, device))")
    target = load("user.py:build", StepOptions(batch=3))
    with pytest.raises(StepError):
        target.build()
    assert sys.modules["_trainfit_target_user"].calls == [(3, 1, "cpu")]


def test_options_reach_a_function_that_takes_any_keyword() -> None:
    write("user.py", "calls = []\ndef build(**options): calls.append(options)")
    with pytest.raises(StepError):
        load("user.py:build", StepOptions(dtype="bf16")).build()
    assert sys.modules["_trainfit_target_user"].calls == [{"dtype": "bf16"}]


def test_option_without_a_parameter_is_refused() -> None:
    write("user.py", USER_STEP)
    assert message_of(SizeNotTaken, "user.py:build", seq=128) == (
        "--seq cannot be passed on: build() in user.py has no parameter named seq. "
        "Add one, or leave --seq out."
    )


def test_missing_file_suggests_a_neighbour() -> None:
    write("train.py", USER_STEP)
    message = message_of(TargetError, "trian.py:build")
    assert message.startswith("there is no file 'trian.py' (the current folder is ")
    assert message.endswith("Did you mean train.py?")


def test_folder_instead_of_file() -> None:
    Path("folder.py").mkdir()
    assert message_of(TargetError, "folder.py:build") == "'folder.py' is a folder, not a Python file."


def test_file_that_is_not_python() -> None:
    write("folder/notes.txt", "")
    assert message_of(TargetError, "folder/notes.txt:build") == (
        "'folder/notes.txt' is not a Python file; its name must end in .py."
    )


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        (USER_STEP, "biuld", "user.py has no function 'biuld'. Did you mean build?"),
        (USER_STEP, "zzz", "user.py has no function 'zzz'; it defines build."),
        ("x = 1", "zzz", "user.py has no function 'zzz'; it defines none."),
        ("build = 3", "build", "'build' in user.py is of type int, not a function."),
        ("build = None", "build", "'build' in user.py is of type NoneType, not a function."),
        (
            "def build(config): ...",
            "build",
            "build() in user.py needs config; pass --set config=VALUE, or give a default.",
        ),
        (
            "def build(batch): ...",
            "build",
            "build() in user.py needs batch; pass --batch, or give a default.",
        ),
    ],
)
def test_function_that_cannot_be_called(text: str, function: str, message: str) -> None:
    write("user.py", text)
    assert message_of(TargetError, f"user.py:{function}").startswith(message)


@pytest.mark.parametrize(
    ("text", "returned"),
    [
        ("def build(): pass", "None (is the return missing?)"),
        ("def build(): return 1, 2", "a tuple"),
        ("async def build(): pass", "a coroutine"),
        ("build = dict", "a dict"),
    ],
)
def test_function_that_returns_no_step(text: str, returned: str) -> None:
    write("user.py", text)
    with pytest.raises(StepError) as raised:
        load("user.py:build", StepOptions()).build()
    assert str(raised.value).startswith(
        f"build() in user.py returned {returned}, not a trainfit.Step; end it with return trainfit.Step("
    )


def test_missing_module() -> None:
    message = message_of(TargetError, "no_such_package.module:build")
    assert message.startswith(
        "there is no module 'no_such_package', neither installed nor in the current folder"
    )


def test_error_in_the_users_function_shows_their_frames_only() -> None:
    write("user.py", "def helper():\n    raise ValueError('too  small')\n\ndef build():\n    helper()\n")
    with pytest.raises(UserCodeError) as raised:
        load("user.py:build", StepOptions()).build()
    assert str(raised.value) == "build() in user.py raised ValueError: too small"
    assert 'user.py", line 5, in build' in raised.value.user_traceback
    assert 'user.py", line 2, in helper' in raised.value.user_traceback
    assert raised.value.user_traceback.rstrip().endswith("ValueError: too  small")
    assert "user_code.py" not in raised.value.user_traceback


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("raise KeyError('key')", "KeyError: 'key'"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("def build(:", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("place", ["user.py", "module_of_test"])
def test_error_while_importing(text: str, summary: str, place: str) -> None:
    write("user.py", text)
    write("module_of_test.py", text)
    with pytest.raises(UserCodeError) as raised:
        load(f"{place}:build", StepOptions())
    assert str(raised.value) == f"importing {place} raised {summary}"
    assert "user_code.py" not in raised.value.user_traceback
    assert "importlib" not in raised.value.user_traceback


@pytest.mark.parametrize("place", ["user.py", "module_of_test"])
def test_a_script_that_ends_while_it_is_imported(place: str) -> None:
    text = "import sys\nsys.exit(3)"
    write("user.py", text)
    write("module_of_test.py", text)
    with pytest.raises(UserCodeError) as raised:
        load(f"{place}:build", StepOptions())
    assert str(raised.value) == (
        f"importing {place} ended the program: it called sys.exit with 3. What is to run only as a script "
        'belongs under if __name__ == "__main__".'
    )
    assert "line 2" in raised.value.user_traceback


def test_a_step_error_of_ours_passes_through_the_users_function() -> None:
    write("user.py", "import trainfit\ndef build(): return trainfit.Step(model=1, optimizer=None, run=print)")
    with pytest.raises(StepError, match=r"Step\.model must be a torch\.nn\.Module, got int"):
        load("user.py:build", StepOptions()).build()


# Hugging Face configs

pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPEECH_CLASSIFIER = "Wav2Vec2ForSequenceClassification"
IMAGE = {"image_size": 32, "patch_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**TEXT, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
    | {"bos_token_id": 0, "eos_token_id": 0},
    "bert": TEXT,
    "roberta": TEXT | {"pad_token_id": 1},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 128},
    "bart": ENCODER_DECODER | {"max_position_embeddings": 64},
    "vit": {**TEXT, "image_size": 32, "patch_size": 8, "num_labels": 10},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3},
    "whisper": ENCODER_DECODER | {"max_source_positions": 20, "max_target_positions": 16, "num_mel_bins": 8},
    "clip": {"text_config": TEXT, "vision_config": {**TEXT, **IMAGE}, "projection_dim": 16},
    "siglip": {"text_config": TEXT, "vision_config": {**TEXT, **IMAGE}},
    "gemma3": {
        "text_config": {**TEXT, "num_key_value_heads": 2, "head_dim": 8},
        "vision_config": {**TEXT, **IMAGE},
        "mm_tokens_per_image": 4,
    },
    "wav2vec2": TEXT
    | {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size": 32},
}


def hf_target(model_type: str, **changes: Any) -> str:
    values = {"model_type": model_type} | CONFIGS.get(model_type, {}) | changes
    return "hf:" + write("model/config.json", json.dumps(values))


@pytest.mark.parametrize(
    ("model_type", "architecture", "task", "options", "built"),
    [
        ("llama", None, None, {}, "LlamaForCausalLM"),
        ("llama", "LlamaForSequenceClassification", None, {}, "LlamaForSequenceClassification"),
        ("gpt2", "GPT2Model", "causal-lm", {}, "GPT2LMHeadModel"),
        ("bert", None, None, {}, "BertForMaskedLM"),
        ("bert", "BertForPreTraining", "masked-lm", {}, "BertForMaskedLM"),
        ("bert", "BertForTokenClassification", None, {}, "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering", None, {}, "BertForQuestionAnswering"),
        ("bert", "BertForMultipleChoice", None, {"seq": 8}, "BertForMultipleChoice"),
        ("bart", "BartForQuestionAnswering", None, {}, "BartForQuestionAnswering"),
        ("llama", "LlamaForTokenClassification", None, {}, "LlamaForTokenClassification"),
        ("clip", "CLIPModel", None, {}, "CLIPModel"),
        ("clip", None, None, {"image_size": 16, "seq": 8}, "CLIPModel"),
        ("clip", "CLIPForImageClassification", None, {}, "CLIPForImageClassification"),
        ("clip", "CLIPModel", "image-classification", {}, "CLIPForImageClassification"),
        ("siglip", "SiglipModel", None, {}, "SiglipModel"),
        (
            "wav2vec2",
            "Wav2Vec2ForSequenceClassification",
            None,
            {"seq": 400},
            "Wav2Vec2ForSequenceClassification",
        ),
        ("bert", "BertForMaskedLM", "text-classification", {}, "BertForSequenceClassification"),
        ("roberta", None, None, {}, "RobertaForMaskedLM"),
        ("t5", None, None, {"seq": 16}, "T5ForConditionalGeneration"),
        ("bart", None, None, {}, "BartForConditionalGeneration"),
        ("bart", None, "text-classification", {}, "BartForSequenceClassification"),
        ("vit", None, None, {}, "ViTForImageClassification"),
        ("vit", None, None, {"image_size": 48}, "ViTForImageClassification"),
        ("resnet", None, None, {"image_size": 32}, "ResNetForImageClassification"),
        ("whisper", None, None, {}, "WhisperForConditionalGeneration"),
        ("wav2vec2", None, None, {"seq": 400}, "Wav2Vec2ForCTC"),
    ],
)
def test_config_runs_one_step(
    model_type: str, architecture: str | None, task: str | None, options: Any, built: str
) -> None:
    architectures = {} if architecture is None else {"architectures": [architecture]}
    target = load(hf_target(model_type, **architectures), StepOptions(batch=2, **options), task)
    step = target.build()
    assert (target.kind, type(step.model).__name__) == ("hf", built)
    assert torch.isfinite(step.run().detach())


@pytest.mark.parametrize("dtype", ["bf16", "bf16-autocast", "fp16-autocast"])
@pytest.mark.parametrize("model_type", ["llama", "vit", "whisper"])
def test_config_runs_in_every_dtype(model_type: str, dtype: Any) -> None:
    step = load(hf_target(model_type), StepOptions(batch=2, dtype=dtype)).build()
    assert torch.isfinite(step.run().detach())


@pytest.mark.parametrize(
    ("published", "requested", "weights"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("float16", None, torch.bfloat16),
        ("float32", None, torch.float32),
        (None, None, torch.float32),
        ("bfloat16", "fp32", torch.float32),
    ],
)
def test_dtype_of_the_config_is_the_default(published: Any, requested: Any, weights: torch.dtype) -> None:
    target = load(hf_target("llama", dtype=published), StepOptions(dtype=requested))
    for _ in range(2):  # a second build must not see what the first one left behind
        assert {parameter.dtype for parameter in target.build().model.parameters()} == {weights}


@pytest.mark.parametrize(
    ("changes", "labels_dtype"),
    [
        ({"num_labels": 1}, torch.float32),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.float32),
        ({"num_labels": 3}, torch.int64),
    ],
)
def test_labels_follow_the_problem_type(changes: Any, labels_dtype: torch.dtype) -> None:
    step = load(hf_target("bert", **changes), StepOptions(batch=2), "text-classification").build()
    seen: list[torch.dtype] = []
    step.model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(inputs["labels"].dtype), with_kwargs=True
    )
    step.run()
    assert seen == [labels_dtype]


def test_folder_with_a_config_and_no_cache() -> None:
    hf_target("llama")
    step = load("hf:model", StepOptions(batch=1, seq=8)).build()
    assert step.model.config.use_cache is False  # type: ignore[union-attr]


def test_without_transformers_the_install_line_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = message_of(MissingExtra, hf_target("llama"))
    assert "pip install -c constraints.txt 'trainfit[hf]'" in message.splitlines()[1]


def test_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    message = message_of(MissingExtra, hf_target("llama"))
    assert message.startswith("hf: targets need transformers 5 or newer, not 4.57.0:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json is not readable as JSON: Expecting property name"),
        ("\x00", "config.json is not readable as JSON"),
        ("[1]", "config.json holds a JSON list, not an object."),
        ("{}", 'config.json has no "model_type", so it is not the config of a transformers model.'),
        ('{"model_type": 3}', 'config.json has no "model_type"'),
        ('{"model_type": "lama"}', "has no model_type 'lama'. Did you mean llama"),
        ('{"model_type": "zzzzzzz"}', "has no model_type 'zzzzzzz'."),
        ('{"model_type": "zzzzzzz", "auto_map": {}}', "Code that a config names is never run."),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json: transformers refuses this config: "),
        (
            '{"model_type": "gpt2", "architectures": ["GPT2Model"]}',
            "config.json is for GPT2Model, whose training inputs trainfit does not know. Pass --task causal",
        ),
        (
            '{"model_type": "bert", "architectures": ["BertForPreTraining"]}',
            "is for BertForPreTraining, whose training inputs trainfit does not know. Pass --task masked-lm,",
        ),
        (
            '{"model_type": "clip", "architectures": ["CLIPTextModel"]}',
            "Pass --task image-text-contrast or image-classification, or write the step yourself",
        ),
        (
            '{"model_type": "clap", "architectures": ["ClapModel"]}',
            "is for ClapModel, whose training inputs trainfit does not know. Write the step yourself",
        ),
        (
            '{"model_type": "detr", "architectures": ["DetrForObjectDetection"]}',
            "is for DetrForObjectDetection, whose training inputs trainfit does not know.",
        ),
        (
            '{"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}',
            "trainfit does not know",
        ),
        (
            '{"model_type": "siglip2", "architectures": ["Siglip2Model"]}',
            "trainfit does not know the inputs of siglip2 for image-text-contrast",
        ),
        ('{"model_type": "gemma3"}', "takes more than text (vision_config)"),
        ('{"model_type": "sam"}', "there is no training task for model_type 'sam'. Write the step yourself"),
        pytest.param('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "is not readable as JSON", id="deep"),
        ('{"model_type": "speech_to_text"}', "does not know the audio inputs of speech_to_text"),
        ('{"model_type": "wav2vec2-bert"}', "does not know the audio inputs of wav2vec2-bert"),
    ],
)
def test_config_that_is_no_training_target(text: str, message: str) -> None:
    assert message in message_of(TargetError, "hf:" + write("config.json", text))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("hf:", "hf: needs a config.json or the folder that holds one"),
        ("hf:meta-llama/Llama-3", "there is no file or folder 'meta-llama/Llama-3', and trainfit does not"),
        ("hf:.", "the folder '.' holds no config.json."),
    ],
)
def test_config_that_is_not_there(target: str, message: str) -> None:
    assert message_of(TargetError, target).startswith(message)


def test_unknown_task_lists_the_known_ones() -> None:
    assert message_of(OptionError, hf_target("llama"), task="chat") == (
        "--task must be one of speech-seq2seq, seq2seq-lm, masked-lm, causal-lm, image-text-contrast, "
        "image-classification, ctc, text-classification, token-classification, question-answering, "
        "multiple-choice, audio-classification, got 'chat'."
    )


def test_task_the_model_cannot_do_lists_those_it_can() -> None:
    message = message_of(TargetError, hf_target("llama"), task="masked-lm")
    assert message.startswith("transformers has no llama model for the task masked-lm.")
    assert (
        "Pass --task causal-lm, text-classification, token-classification or question-answering, or write "
        "the step yourself"
    ) in message


def test_a_model_that_sees_is_trained_on_text_alone_only_if_asked() -> None:
    named = hf_target("gemma3", architectures=["Gemma3ForConditionalGeneration"])
    assert "takes more than text (vision_config)" in message_of(TargetError, named)
    step = load(named, StepOptions(batch=2, seq=8), "causal-lm").build()
    assert torch.isfinite(step.run().detach())


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("llama", {"seq": 65}, "--seq 65 is longer than the 64 positions of this config; pass a shorter one"),
        ("roberta", {"seq": 63}, "--seq 63 is longer than the 62 positions of this config"),
        ("whisper", {"seq": 17}, "--seq 17 is longer than the 16 positions of this config"),
        ("llama", {"image_size": 8}, "--image-size does not apply to the task causal-lm, which takes --seq."),
        ("vit", {"seq": 8}, "--seq does not apply to an image model, which takes --image-size."),
        ("vit", {"image_size": 33}, "--image-size 33 is not a multiple of the patch size 8."),
        ("wav2vec2", {"seq": 50}, "--seq 50 audio samples are too few for this model; the least is 120."),
    ],
)
def test_config_refuses_sizes_it_cannot_take(model_type: str, options: Any, message: str) -> None:
    assert message_of(OptionError, hf_target(model_type), **options).startswith(message)


def test_model_that_transformers_cannot_build() -> None:
    target = load(hf_target("llama", num_attention_heads=4, hidden_act="no-such-activation"), StepOptions())
    with pytest.raises(TargetError, match="transformers cannot build llama for causal-lm: KeyError"):
        target.build()
