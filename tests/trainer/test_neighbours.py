"""Parts are joined to the bits of torch.cat, whatever their strides: a dimension of 0 or 1 may have any."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rowcast.trainer.models.embedding import aligned, joined

MEMORY = np.arange(500, dtype=np.float32)  # more than any part below reaches
SIZES = st.sampled_from([0, 1, 1, 2, 3])


@st.composite
def parts_of_memory(draw: st.DrawFn) -> list[Tensor]:
    """Tensors [n, *shape] anywhere in one memory, which two storages of different sizes share."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=2))
    parts: list[Tensor] = []
    end = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 4))):
        size = (draw(SIZES), *shape)
        strides: list[int] = []
        least = 1
        for length in reversed(size):  # those of contiguous parts; any for a dimension of 0 or 1 and where the dice say
            is_free = length < 2 or draw(st.integers(0, 9)) == 0
            strides.insert(0, draw(st.integers(least, least + 4)) if is_free else least)
            least *= max(1, length)
        begin = draw(st.sampled_from([end, end, draw(st.integers(0, 20))]))
        last = begin + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True) if length)
        memory = MEMORY[:40] if last < 40 and draw(st.booleans()) else MEMORY
        parts.append(torch.from_numpy(memory).as_strided(size, strides, begin))
        end = begin + parts[-1].numel()
    return parts


@settings(max_examples=500)
@given(parts_of_memory())
def test_joined_parts_are_those_of_cat(parts: list[Tensor]) -> None:
    assert torch.equal(joined(parts), torch.cat(parts))
    assert joined(parts).stride() == torch.cat(parts).stride()


@pytest.mark.parametrize("num_samples", [0, 1, 2, 3])
@pytest.mark.parametrize("dim", [1, 4])
@pytest.mark.parametrize("first", [0, 3])
def test_columns_of_one_gradient_are_joined_for_any_number_of_samples(num_samples: int, dim: int, first: int) -> None:
    memory = torch.arange(100.0)
    for whole in (memory[: num_samples * 15].view(num_samples, 15), memory[7:].as_strided((num_samples, 15), (20, 1))):
        parts = whole[:, first : first + 2 * dim].split_with_sizes([dim, dim], 1)
        assert torch.equal(joined(parts), torch.cat(parts))


def test_rows_that_follow_one_another_are_joined_without_a_copy() -> None:
    whole = torch.arange(24.0).view(6, 4)
    assert joined(whole.split_with_sizes([1, 0, 5])).data_ptr() == whole.data_ptr()
    assert joined(whole.split_with_sizes([1] * 6)).data_ptr() == whole.data_ptr()


def test_a_models_input_of_one_sample_has_the_strides_of_a_tensor_of_its_own() -> None:
    """A matrix product reads the stride of a dimension of 1, and its bits depend on it."""
    row = torch.randn(1, 40)[:, :33]
    other = torch.randn(64).as_strided((33, 1), (1, 40))
    assert aligned(row).stride() == (33, 1)
    assert aligned(other).stride() == (1, 1)
