"""Tests of machine requirements: valid ones are parsed, and invalid ones are refused."""

import pytest

from ratchet.errors import SettingsError
from ratchet.stages.machine_check import KINDS, parse_requirements


def test_requirements_are_read_with_their_units() -> None:
    asked = parse_requirements(
        " cuda=12.6, vram=22GB,disk=50GiB,download=50Mbps ,upload=0.5gbps,ram=512MiB,cpus=4,gpus=2"
    )
    assert {one.name: one.minimum for one in asked} == {
        "vram": (22_000_000_000,), "gpus": (2,), "cuda": (12, 6), "ram": (2**29,), "cpus": (4,), "disk": (50 * 2**30,),
        "download": (50e6,), "upload": (5e8,),
    }  # fmt: skip
    assert [one.name for one in asked] == [name for name in KINDS if name in {one.name for one in asked}]
    assert asked[0].asked == "22GB"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vrm=22GB", "did you mean vram?"),
        ("VRAM=22GB", "did you mean vram?"),
        ("", "expected one of vram, gpus, cuda"),
        ("vram=1GB,", "found ''; expected one of"),
        ("vram", "vram has no value"),
        ("cuda=", "cuda has no value"),
        ("vram=1GB,vram=2GB", "twice"),
        ("vram=22", "22GiB?"),
        ("vram=-1GB", "expected a size such as 24GiB"),
        ("disk=0GB", "expected at least one byte"),
        ("cuda=twelve", "expected a version"),
        ("cuda=12.6.", "expected a version"),
        ("python=\u0663.\u0661", "expected a version"),
        ("gpus=0", "expected a whole number, 1 or more"),
        ("cpus=1.5", "expected a whole number, 1 or more"),
        ("upload=20", "expected bits per second"),
        ("upload=20MB/s", "expected bits per second"),
        ("upload=0Mbps", "expected bits per second"),
        ("download=infMbps", "expected bits per second"),
    ],
)
def test_invalid_requirements_are_refused_with_valid_ones(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=r"^--require") as refused:
        parse_requirements(text)
    assert says in str(refused.value)
