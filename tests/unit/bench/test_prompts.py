from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.bench.prompts import BUILT_IN, of_categories, read_prompts
from deploy.errors import UserError


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_sets_are_there(name: str) -> None:
    prompts = read_prompts(name)
    assert len(prompts) >= 8 and {p.category for p in prompts} == {name}
    assert len({p.text for p in prompts}) == len(prompts)


def test_a_file_in_each_of_its_forms(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    lines = [
        {"category": "writing", "turns": ["First", "Second"]},
        {"prompt": "Plain"},
        {"messages": turns, "category": "chat"},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = read_prompts(str(file))
    assert first.messages == ({"role": "user", "content": "First"},)
    assert (second.text, second.category) == ("Plain", "mine")
    assert third.messages == tuple(turns) and third.text == "Be brief.\n\nHi"
    assert of_categories((first, second, third), "chat,mine") == (second, third)
    with pytest.raises(UserError, match=r"'no'; there are chat, mine, writing"):
        of_categories((first, second, third), "no")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "is an object, this is list"),
        ("{}", "this line has none"),
        ('{"prompt": "a", "turns": ["b"]}', "has prompt and turns"),
        ('{"prompt": ""}', "'prompt' must be a text"),
        ('{"turns": []}', "'turns' must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', "'role' and 'content'"),
        ('{"prompt": "a", "category": 3}', "'category' must be a text, it is 3"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(UserError, match=f"p.jsonl:2: .*{message}"):
        read_prompts(str(file))


def test_a_missing_an_empty_and_a_foreign_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'rewrites': No such file.* chat and rewrite"):
        read_prompts("rewrites")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(str(tmp_path / "empty"))
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(str(tmp_path / "latin"))
