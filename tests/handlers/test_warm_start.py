"""Warm starts against copying by hand: from real files of every kind, with a report; where one thing is wrong, nothing is."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalfire import Engine, Events
from signalfire.distributed import whole_tensor
from signalfire.handlers import (
    EMA,
    Checkpoint,
    DistributedDataParallel,
    Export,
    Freezing,
    FullyShardedDataParallel,
    TruePrecision,
    WarmStart,
)
from signalfire.tuning import find_learning_rate
from signalfire.weights import export_weights
from tests.kit import assert_same, batches, build, digest, needs, quick
from tests.processes import Failed, assert_alike, run_together

needs("safetensors", "safetensors")

from safetensors.torch import save_file, save_model  # noqa: E402


class Network(nn.Module):
    def __init__(self, outputs: int = 1, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.backbone(x))
        return output


def pretrained(outputs: int = 1) -> Network:
    """A network whose weights and statistics are those of a training."""
    model = Network(outputs, seed=7)
    for x, _ in batches(3):
        model(x)
    return model


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def started(model: nn.Module, *handlers: Any) -> dict[str, Tensor]:
    """The weights with which a run begins."""
    engine, seen = build(model, *handlers), list[dict[str, Tensor]]()
    engine.connect(Events.STARTED, lambda engine: seen.append(copied(engine.modules["model"])))
    engine.run(batches(1), max_epochs=1)
    return seen[0]


# ---- sources ------------------------------------------------------------------------------------------------------


def of_safetensors(model: Network, folder: Path) -> Path:
    save_file(copied(model), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def of_hugging_face(model: Network, folder: Path) -> Path:
    save_file(copied(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def shards(model: Network, folder: Path, save: Callable[[dict[str, Tensor], Path], Any], kind: str) -> Path:
    state = copied(model)
    names = {name: f"part-{place % 2}.{kind}" for place, name in enumerate(state)}
    for file in set(names.values()):
        save({name: value for name, value in state.items() if names[name] == file}, folder / file)
    index = folder / f"{'model' if kind == 'safetensors' else 'pytorch_model'}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def of_shards(model: Network, folder: Path) -> Path:
    return shards(model, folder, save_file, "safetensors")


def of_shards_in_a_folder(model: Network, folder: Path) -> Path:
    shards(model, folder, torch.save, "bin")
    return folder


def of_a_state_dict(model: Network, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def of_a_training_script(model: Network, folder: Path) -> Path:
    state = {f"module._orig_mod.{key}": value for key, value in model.state_dict().items()}
    torch.save({"epoch": 3, "model_state_dict": state, "optimizer": {"state": {}}}, folder / "last.pth")
    return folder / "last.pth"


def of_lightning(model: Network, folder: Path) -> Path:
    state = {f"model.{key}": value for key, value in model.state_dict().items()}
    content = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "state_dict": state, "hyper_parameters": {"lr": 0.1}}
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


def of_the_old_format(model: Network, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def of_a_checkpoint(model: Network, folder: Path, *, weights_only: bool = False, inside: str = "") -> Path:
    """What Checkpoint writes at the end of a run, with the weights that the model has then."""
    engine = build(model, Checkpoint(folder, weights_only=weights_only))
    engine.run(batches(1), max_epochs=1)
    last = engine.find(Checkpoint).last
    assert last is not None
    return last / inside if inside else folder


SOURCES: dict[str, Callable[[Network, Path], Path]] = {
    "safetensors": of_safetensors,
    "hugging face": of_hugging_face,
    "shards": of_shards,
    "shards in a folder": of_shards_in_a_folder,
    "state dict": of_a_state_dict,
    "training script": of_a_training_script,
    "lightning": of_lightning,
    "old format": of_the_old_format,
    "folder of checkpoints": of_a_checkpoint,
    "checkpoint": partial(of_a_checkpoint, inside="state.pt"),
    "weights only": partial(of_a_checkpoint, weights_only=True),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_begins_with_the_weights_of_a_file_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = pretrained()
    source = SOURCES[kind](model, tmp_path)
    assert_same(started(Network(), WarmStart(source)), copied(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not weights at all", "neither a safetensors file nor a file written by torch.save"),
        (b"\x10\0\0\0\0\0\0\0{broken", "is corrupted or not a safetensors file"),
        (b"PK\x03\x04 cut off", "cannot be read as plain tensors"),
    ],
)
def test_a_file_that_holds_no_weights_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=rf"WarmStart\('.*x.bin'\): .*x.bin' (is )?{message}"):
        WarmStart(tmp_path / "x.bin").compare(Network())


def test_nothing_in_a_file_is_run_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"state_dict": copied(Network()), "hyper_parameters": Namespace(lr=0.1)}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x.ckpt' cannot be read as plain tensors.*torch.load\(path, weights_only=F"):
        WarmStart(tmp_path / "x.ckpt").compare(Network())


def test_what_is_not_there_or_holds_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder '.*x.pt'"):
        WarmStart(tmp_path / "x.pt").compare(Network())
    with pytest.raises(FileNotFoundError, match=r"neither a checkpoint nor any of these files: model\.safetensors"):
        WarmStart(tmp_path).compare(Network())
    torch.save({"epoch": 3, "optimizer": {}}, tmp_path / "y.pt")
    with pytest.raises(
        ValueError, match=r"y\.pt' contains no mapping from names to tensors; its entries are 'epoch', 'optimizer'"
    ):
        WarmStart(tmp_path / "y.pt").compare(Network())
    index = of_shards(Network(), tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lists 'part-1\.safetensors', which is not in the same folder"):
        WarmStart(index).compare(Network())
    (tmp_path / "inner").mkdir()
    index = index.rename(tmp_path / "inner" / index.name)
    index.write_text(json.dumps({"weight_map": {"head.weight": "../part-0.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="which is not in the same folder"):
        WarmStart(index).compare(Network())


# ---- comparing ----------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_report_add_up_to_both_sides() -> None:
    given = copied(pretrained(outputs=4))
    del given["backbone.0.bias"]
    given = {name.replace("backbone.1", "norm"): value for name, value in given.items()} | {"extra": torch.ones(2)}
    plan = WarmStart(given, rename={r"^norm\.": "backbone.1."}, exclude="*.num_batches_tracked").compare(Network())
    assert sorted(plan.loaded) == sorted(
        ["backbone.0.weight", *(f"backbone.1.{key}" for key in ("weight", "bias", "running_mean", "running_var"))]
    )
    assert plan.renamed["backbone.1.bias"] == "norm.bias"
    assert len(plan.renamed) == 4
    assert plan.missing == ["backbone.0.bias"]
    assert plan.unexpected == ["extra"]
    assert sorted(plan.other_shape) == ["head.bias", "head.weight"]
    assert plan.kept == plan.left_out == ["backbone.1.num_batches_tracked"]
    assert plan.in_model == len(Network().state_dict())
    assert plan.in_file == len(given)
    text = str(plan)
    assert "5 of 9 tensors loaded" in text
    assert "head.weight ([4, 8] in the file, [1, 8] in the model)" in text
    assert "not allowed, so nothing is loaded: backbone.0.bias, extra, head.weight, head.bias" in text


def wrong(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
    given = copied(pretrained())
    change(given)
    return given


MISMATCHES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda s: s.pop("head.bias"), r"missing from the file: head\.bias\. To accept .* allow=\['head\.\*'\]"),
    "unexpected": (
        lambda s: s.update(other=torch.ones(1)),
        r"unexpected in the file: other\. To accept .* allow=\['other'\]",
    ),
    "shape": (lambda s: s.update({"head.weight": torch.ones(2, 8)}), r"head.weight \(\[2, 8\] in the file, \[1, 8\]"),
    "dtype": (
        lambda s: s.update({"head.weight": torch.ones(1, 8, dtype=torch.int8)}),
        r"head.weight \(torch.int8 in the file, torch.float32 in the model\)",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_what_does_not_fit_is_an_error_and_no_weight_has_changed(kind: str) -> None:
    change, message = MISMATCHES[kind]
    model = Network()
    before = digest(model.state_dict())
    with pytest.raises(ValueError, match=message):
        build(model, WarmStart(wrong(change))).run(batches(1), max_epochs=1)
    assert digest(model.state_dict()) == before


@pytest.mark.parametrize("options", [{}, {"allow": "*"}, {"exclude": "head"}], ids=str)
def test_a_file_of_which_nothing_fits_is_always_an_error(options: dict[str, Any]) -> None:
    model = Network()
    before = digest(model.state_dict())
    given = {f"bert.{name}": value for name, value in copied(pretrained()).items()}
    with pytest.raises(ValueError, match=r"none of the 9 tensors.*rename=\{r'\^bert\\\.': ''\}"):
        build(model, WarmStart(given, **options)).run(batches(1), max_epochs=1)
    assert digest(model.state_dict()) == before


def test_a_part_of_a_model_is_loaded_under_other_names_and_the_head_stays_as_the_seed_made_it() -> None:
    source, model = pretrained(outputs=4), Network()
    given = {name.replace("backbone.", "encoder.body."): value for name, value in copied(source).items()}
    expected = copied(model) | {key: value for key, value in copied(source).items() if key.startswith("backbone")}
    begun = started(model, WarmStart(given, rename={r"^encoder\.body\.": "backbone."}, allow=["head.*"]))
    assert_same(begun, expected)
    begun = started(Network(), WarmStart(given, rename={r"^encoder\.body\.": "backbone."}, include=["backbone"]))
    assert_same(begun, expected)


def test_rules_apply_to_names_with_and_without_the_prefix_of_a_wrapper() -> None:
    given = {f"module.{name.replace('head', 'fc')}": value for name, value in copied(pretrained()).items()}
    for pattern, replacement in ((r"^fc\.", "head."), (r"^module\.fc\.", "head."), (r"fc", "head")):
        plan = WarmStart(given, rename={pattern: replacement}).compare(Network())
        assert len(plan.loaded) == 9
        assert not plan.refused


def test_a_prefix_that_the_model_has_itself_is_not_removed() -> None:
    inner = pretrained()
    model = nn.ModuleDict({"model": Network(), "other": nn.Linear(2, 2)})
    given = {f"model.{name}": value for name, value in copied(inner).items()}
    WarmStart(given, allow="other").compare(model).apply(build(model).modules, given)
    assert_same(model["model"], inner)


def test_two_tensors_for_one_are_refused() -> None:
    given = copied(pretrained())
    given["student.head.bias"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"'head.bias' and 'student.head.bias' in the file would both be loaded as"):
        WarmStart(given, rename={r"^student\.": ""}).compare(Network())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rename": {"encodr": "x"}}, r"rename: 'encodr' matches no name in the file, which has backbone.0.weight"),
        ({"exclude": "hed.*"}, r"exclude: 'hed.\*' matches no name in the file or the model"),
        ({"include": ["head", "bakbone"]}, r"include: 'bakbone' matches no name"),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmStart(copied(pretrained()), **options).compare(Network())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": ""}, r"WarmStart\(source=''\)"),
        ({"source": "s3://bucket/model.safetensors"}, "a URL is not a path"),
        ({"rename": {"(": "x"}}, r"rename=.*: '\(': missing \)"),
        ({"rename": {"x": r"\2"}}, "invalid group reference"),
        ({"rename": [("a", "b")]}, "expected a mapping from regular expressions"),
        ({"allow": []}, r"allow=\[\]"),
    ],
)
def test_wrong_arguments_are_refused_where_they_are_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        WarmStart(**{"source": "x.pt", **options})


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight


def test_a_shared_parameter_is_loaded_under_any_of_its_names(tmp_path: Path) -> None:
    source = Tied(1)
    save_model(source, str(tmp_path / "x.safetensors"))  # which writes one of the two names
    model = Tied(2)
    plan = WarmStart(tmp_path / "x.safetensors").compare(model)
    assert (len(plan.loaded), len(plan.tied), plan.refused) == (1, 1, [])
    both = copied(source)
    both["out.weight"] = both["out.weight"] + 1
    with pytest.raises(ValueError, match=r"are the same parameter in the model, but have different values"):
        WarmStart(both).compare(model)


def test_a_file_in_half_precision_is_converted_to_the_models_dtype() -> None:
    given = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in copied(pretrained()).items()
    }
    begun = started(Network(), WarmStart(given))
    assert_same(begun, {name: value.to(begun[name].dtype) for name, value in given.items()})


# ---- runs ---------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, epochs: int, *handlers: Any) -> Engine:
    engine = build(model, *handlers)
    engine.run(batches(4), max_epochs=epochs)
    return engine


def test_training_goes_on_as_if_the_weights_had_been_copied_by_hand() -> None:
    by_hand = Network()
    by_hand.load_state_dict(pretrained().state_dict())
    one = trained(by_hand, 2, EMA(0.9), Freezing("backbone.0"))
    other = trained(Network(), 2, WarmStart(copied(pretrained())), EMA(0.9), Freezing("backbone.0"))
    assert_same(other.model, one.model)
    assert_same(other.weights()["model"], one.weights()["model"])


def test_a_run_that_continues_or_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    engine = trained(Network(), 1, WarmStart(copied(pretrained())))
    assert "warm_start: 9 of 9 tensors loaded from 'a mapping'\n" in capsys.readouterr().err
    engine.run(batches(4), max_epochs=2)
    assert_same(engine.model, trained(Network(), 2, WarmStart(copied(pretrained()))).model)
    engine.reset()
    engine.run(batches(4), max_epochs=1)
    assert_same(engine.model, trained(Network(), 1, WarmStart(copied(pretrained()))).model)


@pytest.mark.moderate
@pytest.mark.parametrize("order", [1, -1])
def test_a_run_that_resumes_keeps_its_own_weights(
    order: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def handlers() -> list[Any]:
        return [Checkpoint(tmp_path / "run", resume=True), WarmStart(copied(pretrained()))][::order]

    whole = trained(Network(), 3, WarmStart(copied(pretrained())))
    trained(Network(), 2, *handlers())
    state = Checkpoint.load(tmp_path / "run")
    capsys.readouterr()
    resumed = trained(Network(), 3, *handlers())
    assert_same(resumed.model, whole.model)
    assert "warm_start: the run resumes from a checkpoint, so no other weights are loaded" in capsys.readouterr().err
    loaded = build(Network(), WarmStart(tmp_path / "gone"))
    loaded.load_state_dict(state, allow=["checkpoint"])
    loaded.run(batches(4), max_epochs=3)
    assert_same(loaded.model, whole.model)


def test_weights_are_loaded_before_they_are_converted_and_found_again_by_a_finder() -> None:
    begun = started(Network(), TruePrecision("bf16"), WarmStart(copied(pretrained())))
    assert_same(begun, {k: v.bfloat16() if v.is_floating_point() else v for k, v in copied(pretrained()).items()})
    model = Network()
    before = copied(model)
    engine = build(model, WarmStart(copied(pretrained())))
    find_learning_rate(engine, batches(8), steps=8)
    assert_same(model, before)
    engine.run(batches(4), max_epochs=1)
    assert_same(model, trained(Network(), 1, WarmStart(copied(pretrained()))).model)


def test_a_loss_with_parameters_keeps_them_where_the_file_has_none() -> None:
    class Centers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.center = nn.Parameter(torch.full((1,), 5.0))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target - self.center).square().mean()

    engine = build(Network(), WarmStart(copied(pretrained())), loss=Centers())
    plan = engine.find(WarmStart).compare(engine)
    assert plan.kept == ["loss.center"]
    assert not plan.refused


def test_parts_of_several_models_are_named_with_their_module() -> None:
    models = {"student": Network(), "teacher": Network()}
    plan = WarmStart(copied(pretrained()), rename={"^": "teacher."}, include="teacher").compare(models)
    assert len(plan.loaded) == len(plan.kept) == 9


def run_on(folder: Path, missing: bool) -> dict[str, Tensor]:
    rank = int(os.environ["RANK"])
    source = folder / ("gone.pt" if missing and rank == 1 else "model.pt")
    return started(Network(seed=rank), DistributedDataParallel(), WarmStart(source))


def run_sharded(folder: Path) -> list[str]:
    """Save a sharded training, and begin another one with its weights."""
    engine = build(Network(), FullyShardedDataParallel(), Checkpoint(folder / "run"))
    engine.run(batches(4), max_epochs=1)
    trained = engine.weights()["model"]
    other, seen = (
        build(Network(seed=4), FullyShardedDataParallel(), WarmStart(folder / "run")),
        list[dict[str, Tensor]](),
    )
    other.connect(Events.STARTED, lambda engine: seen.append(copied(engine.modules["model"])))
    other.run(batches(2), max_epochs=1)
    return [digest({key: whole_tensor(value) for key, value in one.items()}) for one in (trained, seen[0])]


@pytest.mark.slow
def test_a_sharded_checkpoint_starts_sharded_and_single_runs(tmp_path: Path) -> None:
    trained, begun = assert_alike(run_together(run_sharded, 2, tmp_path))
    assert begun == trained
    assert digest(started(Network(seed=5), WarmStart(tmp_path / "run"))) == trained


def test_a_checkpoint_of_what_is_trained_says_what_it_leaves_out(tmp_path: Path) -> None:
    model = Network()
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    build(model, EMA(0.5), Checkpoint(tmp_path, trained_only=True)).run(batches(2), max_epochs=1)
    plan = WarmStart(tmp_path, allow="backbone").compare(Network())
    assert plan.notes == [
        "4 frozen parameters are not in the file",
        "the averages of 'ema' are not used; the weights come from the last step",
    ]
    assert sorted(plan.missing) == ["backbone.0.bias", "backbone.0.weight", "backbone.1.bias", "backbone.1.weight"]


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = of_safetensors(Network(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    extra = r"the package 'safetensors' is not installed: pip install 'signalfire\[safetensors\]'"
    with pytest.raises(ImportError, match=extra):
        WarmStart(path).compare(Network())
    with pytest.raises(ImportError, match=extra):
        Export(path)
    with pytest.raises(ImportError, match=extra):
        export_weights(build(Network()), path)


@pytest.mark.moderate
@pytest.mark.parametrize("missing", quick([False, True], True))
def test_all_ranks_begin_with_the_weights_or_none(missing: bool, tmp_path: Path) -> None:
    torch.save(pretrained().state_dict(), tmp_path / "model.pt")
    if missing:
        with pytest.raises(Failed, match=r"rank 1 cannot load the weights: FileNotFoundError: .*gone.pt"):
            run_together(run_on, 2, tmp_path, True)
        return
    assert_same(assert_alike(run_together(run_on, 2, tmp_path, False)), pretrained())
