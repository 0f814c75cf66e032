"""What belongs beside a model's weights, and that a folder's links carry nothing else of the machine into an export."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rlbatch.api import DataError
from rlbatch.checkpoint.model_files import model_files, open_found
from rlbatch.config.bounded_files import LARGE_BYTES

BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "qwen.tiktoken", "vocab.bpe"),
    *("source.spm", "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "modeling_own.py", "LICENSE", "LICENSE-MODEL"),
)
OTHERS = (
    *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model.gguf"),
    *("pytorch_model.bin.index.json", "README.md", ".gitattributes", "._tokenizer.json", ".env.txt", "training_args.bin", "figure.png"),
    *(".git/config", "checkpoint-500/config.json", "original/params.json", "additional_chat_templates/notes.txt"),
)


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_what_belongs(tmp_path: Path) -> None:
    """Everything that a tokenizer, a processor, a chat template or the model's code needs, and the licence; no weights, no repository."""
    folder = made(tmp_path / "model", *BESIDE, *OTHERS)
    assert model_files(folder) == {name: folder / name for name in sorted(BESIDE)}


def test_a_snapshot_of_the_hub(tmp_path: Path) -> None:
    """Its files are links to blobs beside it; also where the model's folder is itself a link, or a folder of the snapshot."""
    hub = tmp_path / "models--org--name"
    for place in ("snapshots/1234", "snapshots/1234/sub"):
        for name in ("config.json", "tokenizer.json"):
            made(hub, f"blobs/{name}-hash")
            (hub / place).mkdir(parents=True, exist_ok=True)
            (hub / place / name).symlink_to(os.path.relpath(hub / "blobs" / f"{name}-hash", hub / place))
        found = {name: hub / "blobs" / f"{name}-hash" for name in ("config.json", "tokenizer.json")}
        assert model_files(hub / place) == found
        link = tmp_path / place.replace("/", "-")
        link.symlink_to(hub / place)
        assert model_files(link) == found


def test_links_within_the_folder(tmp_path: Path) -> None:
    """Also through others and by way of its parent; a link to a folder is none of its files, whatever it is called."""
    folder = made(tmp_path / "model", "tokenizer.json", "files/vocab.json")
    (folder / "a.json").symlink_to("b.json")
    (folder / "b.json").symlink_to("../model/files/vocab.json")
    (folder / "c.json").symlink_to("/etc")
    found = model_files(folder)
    assert found == {"tokenizer.json": folder / "tokenizer.json", **dict.fromkeys(("a.json", "b.json"), folder / "files/vocab.json")}


def to_templates(folder: Path) -> None:
    made(folder.parent / "templates", "other.jinja")
    (folder / "additional_chat_templates").symlink_to(folder.parent / "templates")


def to_a_chain(folder: Path) -> None:
    (folder / "second.json").symlink_to("/proc/self/environ")
    (folder / "first.txt").symlink_to("second.json")


def to_other_blobs(folder: Path) -> None:
    """A clone that looks like a hub's cache, with blobs that are a link."""
    (folder.parent.parent / "blobs").symlink_to("/proc/self")
    (folder / "notes.txt").symlink_to("../../blobs/environ")


def huge(folder: Path) -> None:
    (folder / "notes.txt").touch()
    os.truncate(folder / "notes.txt", LARGE_BYTES + 1)


def listening(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(folder)  # its address may have about a hundred characters
        bound.bind("notes.txt")
        os.chdir(before)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "special.txt").symlink_to("/proc/self/environ"), r"special\.txt: is a link to /proc/\d+/environ, which"),
        (lambda folder: (folder / "config.json").symlink_to("/etc/hostname"), r"config\.json: is a link to /etc/hostname, which"),
        (lambda folder: (folder / "notes.txt").symlink_to("../../outside.txt"), r"notes\.txt: is a link to .*/outside\.txt, which is no"),
        (lambda folder: (folder / "notes.txt").symlink_to(".git/config"), r"notes\.txt: is a link to .*/\.git/config, which is no"),
        (to_a_chain, r"first\.txt: is a link to /proc/\d+/environ, which is no file of the model's folder"),
        (to_templates, r"additional_chat_templates/other\.jinja: is a link to .*/templates/other\.jinja, which is no"),
        (to_other_blobs, r"notes\.txt: is a link to /proc/\d+/environ, which is no"),
        (lambda folder: (folder / "notes.txt").symlink_to("gone"), r"notes\.txt: leads nowhere \(No such file"),
        (lambda folder: (folder / "notes.txt").symlink_to("notes.txt"), r"notes\.txt: leads nowhere \(Too many levels"),
        (lambda folder: (folder / "notes.txt").symlink_to("/dev/zero"), r"notes\.txt: is a link to /dev/zero, which is no"),
        (lambda folder: os.mkfifo(folder / "notes.txt"), r"notes\.txt: must be a regular file, is a FIFO"),
        (listening, r"notes\.txt: must be a regular file, is a socket"),
        (huge, r"notes\.txt: has 128 MiB, what lies beside a model's weights at most 128\."),
    ],
)
def test_what_an_export_would_publish_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """Secrets of the machine or of the clone, what never ends, what fills the disk: named, with what to do."""
    folder = made(tmp_path / "snapshots" / "model", "tokenizer.json", ".git/config")
    made(tmp_path, "outside.txt")
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        model_files(folder)
    assert str(caught.value).endswith("Put a copy of the file in its place, or remove it.")


def test_a_link_that_comes_later_is_not_followed(tmp_path: Path) -> None:
    """Between the look at the folder and the copy lies the whole run."""
    path = made(tmp_path, "tokenizer.json") / "tokenizer.json"
    [found] = model_files(tmp_path).values()
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_found(found)
