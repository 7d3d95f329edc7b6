"""A checkpoint whose weights are stored in 8 bits is trained as plain weights under every strategy, or refused."""

import json

import pytest
from safetensors.torch import load_file

from tests.model.stored_weights import WRITERS, write_config

LORA = "lora: {rank: 4}"


def model(folder, keys=""):
    return f"model={{name: {folder}, tokenizer: {{train: {{vocabulary_size: 320}}}}{keys and f', {keys}'}}}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a model with weights stored in fp8, of one in mxfp4, and of one that cannot be trained."""
    place = tmp_path_factory.mktemp("stored")
    for name in ("fp8", "mxfp4", "gptq"):
        (place / name).mkdir()
    WRITERS["fp8"](place / "fp8")
    WRITERS["mxfp4"](place / "mxfp4")
    write_config(place / "gptq", {"quant_method": "gptq", "bits": 4})
    return place


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("method", "keys"), [("fp8", ""), ("mxfp4", LORA)])
def test_losses_are_those_of_one_process_and_the_export_is_plain(launch, folders, method, keys):
    words = [model(folders / method, keys), "train.steps=4", "train.learning_rate=1e-3"]
    alone = launch(None, name=f"stored-{method}", overrides=words)
    assert alone.code == 0, alone.output
    assert f"model.name: weights are stored in {method}, and trained as plain ones in float32" in alone.output
    for strategy in ("fsdp2", "zero2"):
        run = launch(strategy, name=f"stored-{method}-{strategy}", overrides=words)
        assert run.code == 0, run.output
        assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)
    if not keys:
        assert "quantization_config" not in json.loads((alone.folder / "final/config.json").read_text())
        names = set(load_file(alone.folder / "final/model.safetensors"))
        assert names == set(load_file(folders / method / "plain/model.safetensors"))


@pytest.mark.full
def test_a_checkpoint_stored_by_gptq_is_refused_with_one_message(launch, folders):
    run = launch(None, name="gptq", overrides=[model(folders / "gptq", LORA)])
    assert run.code == 2
    assert "stored quantized by gptq, which cannot be trained" in run.output and "Traceback" not in run.output
