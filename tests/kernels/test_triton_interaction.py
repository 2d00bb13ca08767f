"""The fused interaction: one order of additions in plain torch operations and in Triton."""

from contextlib import nullcontext

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from rowcast.trainer.kernels import choose, torch_ops, triton_ops
from rowcast.trainer.kernels.choose import choose_interaction, choose_kernels, interaction_difference
from tests.support.full_capacity import make_job, table

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_features", "dim", "batch_size"), [(1, 1, 3), (1, 33, 2), (3, 4, 5), (7, 5, 2), (8, 16, 0), (26, 128, 2)]
)
def test_triton_has_the_bits_of_torch(num_features: int, dim: int, batch_size: int) -> None:
    assert interaction_difference(triton_ops, CPU, num_features, dim, batch_size) is None


def test_another_bit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(triton_ops, "WARP_FLOATS", 1)  # no bit depends on the number of warps
        assert interaction_difference(triton_ops, CPU, 3, 4) is None
    forward = triton_ops.forward
    monkeypatch.setattr(triton_ops, "forward", lambda bottom, features: forward(bottom, features) * 1.0000001)
    assert interaction_difference(triton_ops, CPU, 3, 4) == "products differ from those of torch"


def test_a_cuda_device_gets_triton_and_torch_with_a_warning_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(choose, "refuse_if_lost", lambda device, cause: None)
    monkeypatch.setattr(choose, "interaction_difference", lambda *args: None)
    cuda = torch.device("cuda", 0)
    assert choose_interaction(cuda, "auto", 3, 4) is triton_ops
    assert choose_interaction(cuda, "torch", 3, 4) is torch_ops
    assert choose_interaction(CPU, "auto", 3, 4) is torch_ops

    def fail(*args: object) -> None:
        raise RuntimeError("no kernel image is available")

    for check, cause in ((fail, "no kernel image"), (lambda *args: "products differ", "products differ")):
        monkeypatch.setattr(choose, "interaction_difference", check)
        choose_interaction.cache_clear()
        with capture_logs() as logs:
            assert choose_interaction(cuda, "auto", 3, 4) is torch_ops
        assert [cause in log["cause"] for log in logs] == [True]
    choose_interaction.cache_clear()


def test_a_run_compiles_its_interaction_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []
    monkeypatch.setattr(choose, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(choose, "triton_kernels", lambda device, job: torch_ops)
    monkeypatch.setattr(choose, "interaction_difference", lambda kernels, device, *sizes: tried.append(sizes))
    for interaction in ("bmm", "fused"):
        model = {"bottom_mlp": [8, 4], "top_mlp": [7, 1], "interaction": interaction}
        choose_interaction.cache_clear()
        choose_kernels(torch.device("cuda", 0), make_job([table("a", 9, 4, ["a", "b"])], model=model))
    assert tried == [(2, 4)], "two features of dimension 4, for the fused interaction only"
    choose_interaction.cache_clear()


def test_products_and_gradients_are_near_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    bottom, features = torch.randn(9, 128), torch.randn(26, 9, 128)
    grad = torch.randn(9, 128 + 351)
    vectors = torch.cat([bottom[None], features]).double().requires_grad_()
    exact = reference(vectors)
    torch.autograd.backward(exact, grad.double())
    expected = vectors.grad
    assert expected is not None
    found = []
    for floats in (torch_ops.BLOCK_FLOATS, 1):
        monkeypatch.setattr(torch_ops, "BLOCK_FLOATS", floats)
        own = torch_ops.forward(bottom, features)
        grads = torch.cat([part.view(-1, 9, 128) for part in torch_ops.backward(bottom, features, grad)])
        torch.testing.assert_close(own.double(), exact, rtol=0, atol=2e-5)
        torch.testing.assert_close(grads.double(), expected, rtol=0, atol=1e-5)
        found.append((own, grads))
    assert all(map(torch.equal, *found))


def reference(vectors: Tensor) -> Tensor:
    i, j = torch.tril_indices(len(vectors), len(vectors), offset=-1)
    return torch.cat([vectors[0], (vectors[i] * vectors[j]).sum(2).T], dim=1)
