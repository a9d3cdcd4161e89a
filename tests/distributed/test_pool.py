# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The pool's ranks stay cheap however many meshes the tests build in them."""

from pathlib import Path

from tests.support.rank_pool import RankPool, new_folder


def groups_of_meshes(count: int, *names: str) -> tuple[list[list[str]], int]:
    """Build equal 2 x 2 meshes; return their groups' names, and how many groups the rank knows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _world

    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for _ in range(count)]
    found = [[str(mesh.get_group(name).group_name) for name in names] for mesh in meshes]
    return found, len(_world.pg_map)


def test_equal_meshes_of_two_calls_share_groups(four_ranks: RankPool) -> None:
    for rank in range(4):
        first, known = four_ranks.run(groups_of_meshes, 1, "pool_a", "pool_b")[rank]
        again, known_again = four_ranks.run(groups_of_meshes, 1, "pool_a", "pool_b")[rank]
        assert (first, known) == (again, known_again)


def test_meshes_of_one_call_and_other_dimensions_have_their_own(four_ranks: RankPool) -> None:
    _, before = four_ranks.run(groups_of_meshes, 1, "pool_a", "pool_b")[0]
    (first, second), after = four_ranks.run(groups_of_meshes, 2, "pool_a", "pool_b")[0]
    assert not set(first) & set(second) and after >= before
    other, most = four_ranks.run(groups_of_meshes, 1, "pool_a", "pool_c")[0]
    assert other[0][0] == first[0] and other[0][1] not in first and most > before


def test_folders_of_ranks_go_with_the_pool() -> None:
    pool = RankPool(1)
    (folder,) = pool.run(new_folder)
    assert Path(folder).is_dir()
    pool.close()
    assert Path(folder).is_dir()  # results of earlier calls may lie there
    del pool
    assert not Path(folder).exists()
