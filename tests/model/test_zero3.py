import json

import pytest

from tests.launching import run, torchrun_command


@pytest.mark.distributed
def test_two_ranks_of_zero3_draw_and_load_the_weights_of_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    log = tmp_path / "log.txt"
    command = torchrun_command("-m", "tests.model.zero3_program", str(tmp_path / "model"))
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    code = run(command, log=log, timeout_seconds=540, environment=on_cpu)
    assert code == 0, log.read_text()[-3000:]
    # llama, gpt2, qwen3 (embeddings tied), llama under LoRA with DoRA and a saved head, llama from its folder, and the
    # factors of LoRA in one pass with the gradients of one process
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [21, 28, 24, 21, 21, 28]
