"""What the gather kernel refuses before it is launched, so that no device and no interpreter is needed."""

from __future__ import annotations

import pytest
import torch
from gathering import dense_kept, empty_slots, prompt, ragged_kept

pytest.importorskip("triton")

from kvfactory.kernels.gather import gather_kept  # noqa: E402


def call(sources, targets, kept=None, ends=None):
    gather_kept(sources, dense_kept(1, 2, 9, 5) if kept is None else kept, targets, slack=3, ends=ends)


def test_more_than_two_sources():
    k, v = prompt(1, 2, 9, 16)
    with pytest.raises(ValueError, match="one source or two to as many targets, not 3, 3"):
        call((k, v, k), empty_slots(3, 24, 16))


def test_sources_of_two_shapes():
    """The second one would be read by the indices of the first, beyond its end."""
    (k, _), (_, v) = prompt(1, 2, 9, 16), prompt(1, 2, 8, 16)
    with pytest.raises(ValueError, match="alike, not .1, 2, 9, 16. and .1, 2, 8, 16."):
        call((k, v), empty_slots(2, 24, 16))


@pytest.mark.parametrize("change", [lambda x: x[:, :8], lambda x: x[::2], lambda x: x.repeat(1, 2)])
def test_targets_of_another_width_or_apart_in_memory(change):
    with pytest.raises(ValueError, match="contiguous .slots, D."):
        call(prompt(1, 2, 9, 16), [change(x) for x in empty_slots(2, 48, 16)])


def test_targets_with_more_slots_than_32_bits_count():
    """On the meta device, where nothing is allocated."""
    sources = [x.to("meta") for x in prompt(1, 2, 9, 16)]
    targets = [torch.empty(2**31, 16, device="meta") for _ in range(2)]
    with pytest.raises(ValueError, match=f"do not fit {2**31} slots"):
        call(sources, targets, dense_kept(1, 2, 9, 5).to("meta"))


def test_ends_apart_in_memory():
    kept, ends = ragged_kept(2, 9, 0)
    with pytest.raises(ValueError, match="ends must be contiguous"):
        call(prompt(1, 2, 9, 16), empty_slots(2, 40, 16), kept, ends=torch.stack([ends, ends], dim=1)[:, 0])
