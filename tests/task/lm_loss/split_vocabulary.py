"""On each of two ranks: the loss over a vocabulary that they share against the loss over the whole one."""

import torch
import torch.distributed as dist

from finetune.runtime.parallel import VocabularyPart
from finetune.task.lm_loss import chunked_loss
from finetune.task.lm_loss.chunked_loss import LossSpec
from finetune.task.lm_loss.logit_transform import LogitTransform
from finetune.task.lm_loss.token_loss import TokenLoss

TARGETS, HIDDEN, VOCABULARY = 11, 8, 12


def compare(loss: TokenLoss, transform: LogitTransform, *, rows_per_chunk: int, has_bias: bool) -> None:
    rank = dist.get_rank()
    part = VocabularyPart(dist.group.WORLD, 6 * rank, size=6, total=VOCABULARY)
    own = slice(6 * rank, 6 * rank + 6)
    torch.manual_seed(0)
    rows, weight = torch.randn(TARGETS, HIDDEN).round(), torch.randn(VOCABULARY, HIDDEN).round()
    bias = torch.randn(VOCABULARY).round()
    weight[9], bias[9] = weight[2], bias[2]  # equal logits in both parts, exact since these are whole numbers
    labels = torch.arange(TARGETS) % VOCABULARY
    for function in (chunked_loss.loss_sums, lambda *inputs: chunked_loss.row_losses(*inputs)[0].square().sum()):
        results = []
        for split in (None, part):
            columns = slice(None) if split is None else own
            leaves = [rows.clone(), weight[columns].clone(), *([bias[columns].clone()] if has_bias else [])]
            inputs = [leaf.requires_grad_() for leaf in leaves]
            spec = LossSpec(loss, transform, torch.float32, rows_per_chunk, split)
            value = function(inputs[0], inputs[1], inputs[2] if has_bias else None, labels, spec)
            value.flatten()[0].backward()
            of_rows, *of_own = [leaf.grad for leaf in inputs]
            if split is not None:
                dist.all_reduce(of_rows)
            results.append([value, of_rows, *(gradient if split else gradient[own] for gradient in of_own)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    correct = [
        chunked_loss.loss_and_num_correct(
            rows,
            weight[columns],
            bias[columns] if has_bias else None,
            labels,
            LossSpec(TokenLoss(), transform, torch.float32, rows_per_chunk, split),
        )
        for split, columns in ((None, slice(None)), (part, own))
    ]
    torch.testing.assert_close(correct[1], correct[0])
    assert results[0][1].abs().sum() > 1, "there are gradients"


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for loss in (TokenLoss(), TokenLoss(label_smoothing=0.1, z_loss=0.01)):
        for transform in (LogitTransform(), LogitTransform(scale=0.5, soft_cap=3.0)):
            for rows_per_chunk in (4, 64):
                compare(loss, transform, rows_per_chunk=rows_per_chunk, has_bias=rows_per_chunk == 4)
    print(f"rank {dist.get_rank()}: equal", flush=True)
    dist.destroy_process_group()
