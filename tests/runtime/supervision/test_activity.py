"""While rank 0 works alone, its work is the run's sign of life: long work is no hang, and work that stands still is."""

import time

from finetune.runtime import distributed
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.activity import OthersActivity, OwnActivity
from finetune.runtime.supervision.exit import ProcessExit
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.runtime.supervision.status import Peer, StatusFile
from finetune.runtime.supervision.watchdog import Watchdog


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_rank_0_moves_while_its_main_thread_works():
    activity = OwnActivity()
    work(0.05)
    assert activity.has_progressed()
    time.sleep(0.05)
    assert not activity.has_progressed()


def test_the_others_see_rank_0_in_the_status_file(tmp_path):
    now = [1000.0]
    files = [
        StatusFile(tmp_path, rank=rank, me=Peer(rank, "here", rank), launch="now", since=0.0, clock=lambda: now[0])
        for rank in range(2)
    ]
    files[0].start()
    activity = OthersActivity(files[1])
    assert activity.has_progressed()
    assert not activity.has_progressed()
    now[0] += 4.0
    files[0].refresh()
    assert activity.has_progressed()
    assert not activity.has_progressed()


def test_long_work_of_rank_0_is_not_a_hang_unless_it_stalls(tmp_path):
    ended = []
    status = StatusFile(tmp_path, rank=0, me=Peer(0, "here", 10), launch="now", since=0.0)
    status.start()
    ending = ProcessExit(status, rank=0, leave=ended.append)
    dog = Watchdog(tmp_path, status=status, ending=ending, note=ReceivedSignals(), rank=0, world=1)
    heartbeat.fault_point("export.write", step=4)
    dog.detect_hangs(0.3)
    try:
        with distributed.rank_0_works_alone():
            for _ in range(3):
                work(0.2)
                dog.check()
            assert ended == [], "0.6 s passed no point, and something was done all the time"
            time.sleep(0.4)
            dog.check()
        assert ended == [1]
    finally:
        dog.stop()
    assert not distributed.is_rank_0_alone()
