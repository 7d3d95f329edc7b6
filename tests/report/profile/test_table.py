from finetune.report.console import format_event
from finetune.report.events import Profiled
from finetune.report.profile.phases import PHASES
from finetune.report.profile.table import spread_over_ranks
from finetune.report.profile.trace import PhaseSeconds


def of_rank(**seconds):
    spent = {**dict.fromkeys(PHASES, 0.0), **seconds}
    return PhaseSeconds(spent, wall=sum(spent.values()), overlapped=0.02)


def test_the_table_shows_a_step_and_names_the_rank_for_which_the_others_wait():
    ranks = [of_rank(forward=0.2, communication=0.3), of_rank(forward=0.4, communication=0.1)]
    event = Profiled(
        step=4,
        first_step=3,
        num_steps=2,
        seconds=ranks[0].seconds,
        wall_seconds=ranks[0].wall,
        trace="runs/a/rank-0.pt.trace.json.gz",
        overlapped_seconds=0.02,
        ranks=spread_over_ranks(ranks),
    )
    lines = format_event(event)
    assert lines[0] == "profile of steps 3 to 4, ms per step (rank 0; then all ranks)"
    assert "  forward           100.00   40.0%    100.00    150.00    200.00  rank 1" in lines
    assert "  communication     150.00   60.0%     50.00    100.00    150.00  rank 0" in lines
    assert "  wall              250.00  100.0%    250.00    250.00    250.00  rank 0" in lines
    assert "  communication: exposed; another 10.00 ms overlaps with computation" in lines
    assert "  slowest: rank 1, 200.00 ms a step outside communication, median 150.00" in lines
    assert lines[-1] == "  trace runs/a/rank-0.pt.trace.json.gz"
