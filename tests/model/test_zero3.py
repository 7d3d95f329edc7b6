import json
import os
import sys
from pathlib import Path

import pytest

from finetune.runtime.processes import free_port, run_process_group

PROGRAM = Path(__file__).with_name("zero3_program.py")


@pytest.mark.distributed
def test_two_ranks_of_zero3_draw_and_load_the_weights_of_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = tmp_path / "log.txt"
    command = [*torchrun, str(PROGRAM), str(tmp_path / "model")]
    code = run_process_group(command, log=log, timeout_seconds=540, environment={**os.environ, **settings})
    assert code == 0, log.read_text()[-3000:]
    # llama, gpt2, qwen3 (embeddings tied), llama under LoRA with DoRA and a saved head, llama from its folder
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == [21, 28, 24, 21, 21]
