"""What tests of pages have in common."""

import os
from collections.abc import Iterator

import pytest
from chromium import NAMES, VARIABLE, Browser, browser, find


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        said = f"no Chromium here (none of {', '.join(NAMES)}, and {VARIABLE} is not set): see .ci/browser"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    with browser(program, tmp_path_factory.mktemp("chromium")) as found:
        yield found
