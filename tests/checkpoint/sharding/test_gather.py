from finetune.checkpoint.format.tensor_file import BUFFER, PARAMETER, TensorRecord
from finetune.checkpoint.sharding.gather import ROUND_BYTES, assign_tensors, gather_rounds, plan_files

LAYERS = [TensorRecord(f"layer{i}", key, (i + 1, 7), "F32") for i in range(20) for key in (PARAMETER, "exp_avg")]
STATISTICS = TensorRecord("mean", BUFFER, (7,), "F64")


def test_every_tensor_has_one_writer_and_shares_differ_by_less_than_the_largest():
    for world in (1, 2, 3, 8):
        shares = assign_tensors(LAYERS, world=world)
        assert sorted(r.stored_name for share in shares for r in share) == sorted(r.stored_name for r in LAYERS)
        sizes = [sum(record.size_bytes for record in share) for share in shares]
        assert max(sizes) - min(sizes) <= max(record.size_bytes for record in LAYERS)


def test_buffers_are_rank_zeros_as_only_its_values_are_sure_to_be_everybodys():
    assert STATISTICS in assign_tensors([*LAYERS, STATISTICS], world=4)[0]


def test_files_are_cut_at_their_largest_size_and_wide_types_come_first():
    half = [TensorRecord(f"half{i}", PARAMETER, (3,), "BF16") for i in range(4)]
    planned = plan_files([*half, *LAYERS, STATISTICS], world=2, max_file_bytes=1000)
    assert len({file.name for file in planned}) == len(planned) > 4
    for file in planned:
        assert len(file.records) == 1 or sum(record.size_bytes for record in file.records) <= 1000
        widths = [{"F64": 8, "F32": 4, "BF16": 2}[record.dtype] for record in file.records]
        assert widths == sorted(widths, reverse=True)


def test_writers_receive_at_the_same_time_small_tensors_together_and_large_ones_alone():
    large = [TensorRecord(f"large{i}", PARAMETER, (ROUND_BYTES // 4,), "F32") for i in range(4)]
    rounds = list(gather_rounds(plan_files([*large, *LAYERS], world=2)))
    assert sum(len(each) for each in rounds) == len(large) + len(LAYERS)
    for each in rounds:
        assert {file.writer for file, _ in each} == {0, 1}
        for writer in (0, 1):
            sizes = [record.size_bytes for file, record in each if file.writer == writer]
            assert len(sizes) == 1 or sum(sizes) <= ROUND_BYTES
    assert len(rounds) < 6
