"""The runner of tutorials: it runs the commands of a page and notices output that is not as shown. A proof runs all."""

import re
from pathlib import Path

import pytest

import tutorials

PAGE = """# Page

Save it:

```python title="say.py"
print("run 0123456789ab: 5 steps, loss 0.5")
print("a second line")
```

```console
$ mkdir inside && mv say.py inside
$ cd inside
$ python say.py
run ba9876543210: 5 steps, loss 0.7
a ... line
$ ls none   # exit code 2
```
"""


def test_commands_run_in_order_and_figures_may_differ(tmp_path: Path) -> None:
    steps = tutorials.run_page(PAGE, tmp_path)
    assert [step.text for step in steps[1:]] == re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    page = tutorials.rewrite(PAGE, steps)
    assert page == PAGE.replace("ba9876543210: 5 steps, loss 0.7", "0123456789ab: 5 steps, loss 0.5")
    following = "```console\n$ python say.py\na second line\n```\n"
    assert tutorials.run_page(following, tmp_path)  # begins where the first page ended


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("5 steps, loss 0.7", "6 steps, loss 0.7"),
        ("a ... line", "another line"),
        ("# exit code 2", "# exit code 1"),
        ("say.py\nrun", "x.py\nrun"),
    ],
)
def test_other_output_is_noticed(shown: str, real: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"python|ls"):
        tutorials.run_page(PAGE.replace(shown, real), tmp_path)


def test_the_tutorials_are_pages_of_the_site() -> None:
    site = (tutorials.DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.name: path.read_text(encoding="utf-8") for path in tutorials.DOCS.glob("tutorial_*.md")}
    assert len(pages) >= 6
    for name, page in pages.items():
        assert f": {name}\n" in site
        assert any(step.shown for step in tutorials.read_steps(page))
        before = tutorials.find_prerequisite(page)
        assert "Read next: [" in page
        assert before is None or f"]({before})" in page
