# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch

from tests.support.host_reads import reads
from tests.unit.compat.doors import changed
from torchtitan_lr.compat.linalg import convergence_on_device

WANT = changed("aten::_linalg_check_errors", "linalg.convergence_on_device")


@pytest.mark.parametrize("decompose", [torch.linalg.eigh, torch.linalg.svd])
def test_the_host_does_not_ask_and_nothing_is_lost(decompose):
    x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    x = x + x.mT
    expected = decompose(x)
    assert reads(lambda: decompose(x)) == 1  # the control
    with convergence_on_device(x.device) as codes:
        assert reads(lambda: decompose(x)) == 0, WANT
        found = decompose(x)
        decompose(x.index_fill(0, torch.tensor([1]), torch.nan))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [bool(code.any()) for code in codes] == [False, False, True], WANT
    assert (codes[-1] != 0).tolist()[:2] == [False, True]
    with pytest.raises(torch.linalg.LinAlgError):
        decompose(x.fill_(torch.nan))
