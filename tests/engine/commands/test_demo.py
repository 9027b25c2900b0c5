"""``python -m signalfire``: the first sign of life."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from signalfire.commands.digits import one_dimensional_digits
from tests.kit import finished, python


@pytest.mark.slow
def test_the_demo_trains_prints_the_wiring_and_shows_what_a_handler_does() -> None:
    done = finished("-m", "signalfire")
    assert done.returncode == 0, done.stderr
    linear, whole, less = re.findall(r"^(?:Linear model|MLP|MLP without mixup): (\d+\.\d)%", done.stdout, re.MULTILINE)
    assert float(linear) < 40 < float(less) < float(whole)
    assert f"a difference of {float(whole) - float(less):+.1f} points" in done.stdout
    assert re.search(r"^GET_BATCH_COMPLETED\n  CHANGE    mixup\.mix$", done.stdout, re.MULTILINE)
    assert "iteration 400" in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_the_demo_prints_its_first_line_within_ten_seconds_of_work_also_into_a_pipe() -> None:
    """Seconds of the processor, since other processes may keep this one waiting."""
    with python("-m", "signalfire", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Training on 1,000 one-dimensional digits")
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 10


def test_the_digits_are_those_of_their_seed_and_each_class_has_its_stroke() -> None:
    x, y = one_dimensional_digits(500, seed=3)
    again, other = one_dimensional_digits(500, seed=3), one_dimensional_digits(500, seed=4)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, other[0])
    assert x.shape == (500, 40)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert y.unique().tolist() == list(range(10))
    # The spectrum's size does not depend on the place: samples of one class are alike in it, those of two are not.
    spectra = torch.fft.rfft(x).abs()
    means = torch.stack([spectra[y == digit].mean(0) for digit in range(10)])
    found = torch.cdist(spectra, means).argmin(1)
    assert (found == y).float().mean() > 0.3, "chance would be 0.1"
