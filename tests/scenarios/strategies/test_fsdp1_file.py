"""An accelerate file for FSDP1, as `accelerate config` writes it, gives the losses of fsdp2.yaml, bitwise."""

from pathlib import Path

import pytest

FSDP1 = Path(__file__).parents[2] / "strategy" / "fsdp1"
"""Without its suffix, as `launch` names files."""


@pytest.mark.full
@pytest.mark.distributed
def test_a_file_for_fsdp1_has_the_losses_of_fsdp2_and_one_line_names_its_translated_keys(launch):
    fsdp1, fsdp2 = (launch(name, name=f"version-{Path(name).name}") for name in (str(FSDP1), "fsdp2"))
    assert (fsdp1.code, fsdp2.code) == (0, 0), fsdp1.output + fsdp2.output
    assert "strategy fsdp2 on 2 processes" in fsdp1.output
    (line,) = [line for line in fsdp1.output.splitlines() if line.startswith("fsdp_version: 1 runs under FSDP2")]
    assert "fsdp_use_orig_params" in line
    assert "runs under FSDP2" not in fsdp2.output
    assert len(fsdp1.losses()) == 8
    assert (fsdp1.losses(), fsdp1.norms()) == (fsdp2.losses(), fsdp2.norms())
    assert fsdp1.last_metrics() == fsdp2.last_metrics()
