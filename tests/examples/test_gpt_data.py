"""The text that the GPT learns from."""

import gpt_data
import pytest
import torch


def load(path, context=4, max_bytes=10_000, validation_windows=5):
    return gpt_data.load_text(path, context, max_bytes, validation_windows)


def test_windows():
    windows = gpt_data.Windows(torch.arange(10, 20, dtype=torch.uint8), 4)
    assert len(windows) == 6
    ids, targets = windows[5]
    assert (ids.tolist(), targets.tolist()) == ([15, 16, 17, 18], [16, 17, 18, 19])
    assert ids.dtype == targets.dtype == torch.int64
    assert len(list(windows)) == 6
    assert len(gpt_data.Windows(torch.zeros(4, dtype=torch.uint8), 4)) == 0


def test_the_end_is_held_out(tmp_path):
    text = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(text)
    data = load(tmp_path / "a.txt")
    seen = {byte for window in data.train for part in window for byte in part.tolist()}
    held_out = {byte for window in data.validation for part in window for byte in part.tolist()}
    assert seen == set(text[:180])
    assert held_out <= set(text[180:])
    assert [ids[0].item() for ids, _ in data.validation] == [180, 183, 186, 189, 192]
    assert (data.files, data.size) == (1, 200)


def test_a_folder_is_read_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_bytes(b"c" * 100)
    (tmp_path / "b.md").write_bytes(b"b" * 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0" * 100)  # not a text
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.txt").write_bytes(b"h" * 100)
    data = load(tmp_path, max_bytes=250)
    assert bytes(data.train.text.tolist()) == (b"a" * 100 + b"b" * 100 + b"c" * 50)[:225]
    assert (data.files, data.size) == (3, 250)


def test_the_standard_library():
    data = load(None, context=64, max_bytes=100_000, validation_windows=128)
    assert (len(data.train), len(data.validation), data.size) == (90_000 - 64, 128, 100_000)
    text = bytes(data.train.text.tolist())
    assert b"\ndef " in text
    assert b"__future__" in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", r"no file or folder {}/nothing\.\n--data names a text file, or a folder of text files"),
        ("empty", r"no file in {}/empty\.\n--data names"),
        ("nothing.txt", r"0 bytes of text in {}/nothing\.txt are too few for windows of 4 bytes"),
        (
            "short.txt",
            r"49 bytes of text in {}/short\.txt are too few .* also in the tenth that is held out: 50 are needed\.\n"
            r"Give a longer text with --data, raise --max-bytes \(now 10,000\), or lower --context",
        ),
    ],
)
def test_missing_text(path, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_bytes(b"x" * 49)
    if path == "nothing.txt":
        (tmp_path / path).touch()
    with pytest.raises(gpt_data.MissingTextError, match=message.format(tmp_path)):
        load(tmp_path / path)
    (tmp_path / "short.txt").write_bytes(b"x" * 50)
    assert load(tmp_path / "short.txt").size == 50


def test_a_packed_standard_library(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(gpt_data.MissingTextError, match=rf"no \.py file in {tmp_path} .*\nGive any other text: --data"):
        load(None)
