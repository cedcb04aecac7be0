"""Issue 20, "ugly": https://, hf://, ~, a hub's name and a pipeline's folder are told what they are, by every verb and by load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nobounce
from nobounce import config
from nobounce.cli.main import app

NAMES = {
    "https://huggingface.co/org/name/resolve/main/model.safetensors": "`hf download org/name`",
    "hf://org/name/model.safetensors": "`hf download org/name`",
    "hf://org/name": "`hf download org/name`",
    "https://example.com/model.safetensors": "not URLs",
    "s3://bucket/model": "not URLs",
    "~/model.safetensors": "only a shell expands ~",
    "org/some-Model_7b.v1": "`hf download org/some-Model_7b.v1`",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_to_write_instead(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/h/me")
    with pytest.raises(FileNotFoundError) as caught:
        nobounce.load(name, device="cpu")
    assert NAMES[name] in str(caught.value)
    for verb, code in (("load", 1), ("explain", 1), ("inspect", 1), ("check", 4)):
        config.override(None)
        done = CliRunner().invoke(app, [verb, name, "--device", "cpu"][: 2 if verb == "inspect" else 4])
        assert done.exit_code == code
        assert NAMES[name] in done.output, done.output
    if name.startswith("~"):
        assert "/h/me/model.safetensors" in str(caught.value)


@pytest.mark.parametrize("name", ["missing.safetensors", "./org/name", "/org/name", "a/b/c", "dir/name"])
def test_a_plain_missing_file_is_no_riddle(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        nobounce.load(name, device="cpu")
    assert str(caught.value) == f"{name}: cannot open: No such file or directory (ENOENT)"


def model(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\1")


def test_a_pipeline_names_its_models_and_each_loads(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "scheduler").mkdir()
    folders = ["text_encoder", "unet", "vae"]
    for name in folders:
        model(tmp_path / name / "diffusion_pytorch_model.safetensors")
    with pytest.raises(FileNotFoundError, match="it is a pipeline of several models") as caught:
        nobounce.load(tmp_path, device="cpu")
    assert all(f"{tmp_path}/{name}" in str(caught.value) for name in folders)
    assert "scheduler" not in str(caught.value)
    for verb, code in (("load", 1), ("explain", 1), ("inspect", 1), ("check", 4)):
        config.override(None)
        done = CliRunner().invoke(app, [verb, str(tmp_path), *(["--json"] if verb == "check" else [])])
        assert done.exit_code == code
        assert "it is a pipeline" in done.output
        assert all(f"{tmp_path}/{name}" in done.output for name in folders)
    for name in folders:
        assert list(nobounce.load(tmp_path / name, device="cpu")) == ["a"]


def test_the_root_of_a_cached_model_names_its_revisions(tmp_path: Path) -> None:
    model(tmp_path / "snapshots" / "0123abcd" / "model.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"there are models below it; name one of .*/snapshots/0123abcd"
    ):
        nobounce.load(tmp_path, device="cpu")


def test_a_folder_of_another_format_says_so(tmp_path: Path) -> None:
    (tmp_path / "tf_model.h5").write_bytes(b"PK")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(FileNotFoundError, match=r"it has tf_model\.h5, "):
        nobounce.load(tmp_path, device="cpu")
