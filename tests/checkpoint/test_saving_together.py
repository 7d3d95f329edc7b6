"""Several ranks save one state; what goes wrong on one of them is everybody's, and nobody waits for ever."""

import json

import pytest

from tests.launching import run, torchrun_command

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def told(folder):
    """What each of four ranks was told in each scene."""
    log = folder / "log"
    command = torchrun_command("-m", "tests.checkpoint.saving_program", str(folder), processes=4)
    code = run(command, log=log, timeout_seconds=240)
    assert code == 0, log.read_text(errors="replace")[-8000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


def on_all(told, scene):
    first = told[0][scene]
    assert all(each[scene] == first for each in told), [each[scene] for each in told]
    return first


def test_every_element_is_saved_bitwise_for_any_sharding_and_any_write_mode(told):
    results = on_all(told, "every_bit_arrives")
    assert list(results) == ["False-True", "False-False", "True-True", "True-False"]
    assert [found[:2] for found in results.values()] == [[15, 15]] * 4
    assert len({digest for _, _, digest in results.values()}) == 1


def test_collectives_of_training_continue_while_one_rank_writes_slowly(told):
    assert on_all(told, "while_training_speaks") == [True, True, True, True]


def test_a_full_disk_on_one_rank_is_tried_again_by_all(told):
    name, notes = on_all(told, "tried_again_on_one_rank")
    assert name == "step-000001"
    assert len(notes) == 1 and "No space left" in notes[0] and "(on rank 1)" in notes[0]


def test_after_three_tries_all_give_up_and_the_next_save_succeeds(told):
    error, names, then = on_all(told, "given_up_on_one_rank")
    assert error.startswith("CheckpointError: the checkpoint of step 2 could not be written, 3 times")
    assert "(on rank 1)" in error
    assert (names, then) == (["step-000001"], "step-000003")


def test_a_number_that_is_not_finite_on_one_rank_ends_the_save_on_all(told):
    error, names = on_all(told, "not_finite_on_one_rank")
    assert error.startswith(
        "NonFiniteError: step 1: table is not finite, so no checkpoint was saved. There is no earlier"
    )
    assert names == []


def test_a_thread_that_dies_on_one_rank_is_heard_of_by_all_at_once(told):
    error, was_quick, then, names = on_all(told, "unforeseen_on_one_rank")
    assert error == "CheckpointError: KeyError: 'a bug' (on rank 1)"
    assert was_quick
    assert then == "step-000002" == names[-1]  # the first may be there: rank 1 had written its part of it


def test_machines_that_do_not_share_the_folder_are_found_before_the_first_step(told):
    error = on_all(told, "not_shared")
    assert "a file written by rank 1" in error and "do not share this folder" in error


def test_a_byte_that_flips_later_is_found_and_the_one_before_is_taken(told):
    assert on_all(told, "flipped_after_the_fact") == [1, [".bad-step-000002", "step-000001"]]
