from comparison.saving import results

FIGURES = {
    "stalls": {"ours": [0.1, 0.2, 0.1], "accelerate": [0.5] * 3, "state_bytes": 262_000_000},
    "seeks": {"start": [0.002, 0.002], "late": [0.0025, 0.0025]},
    "resumes": [
        {"round": number, "way": way, "seconds": seconds, "checksum": 1.0}
        for number in range(2)
        for way, seconds in (("ours", 0.1), ("accelerate", 0.5))
    ],
}


def test_a_stall_is_of_the_state_of_the_threshold() -> None:
    save, resume, seek = results(FIGURES)
    assert (save.spread.median, save.unit, save.is_met) == (0.2, "s", False)  # twice as much state, twice as long
    assert (resume.spread.median, resume.is_met) == (0.2, True)
    assert (round(seek.spread.median, 6), seek.unit, seek.is_met) == (0.5, "ms", True)
