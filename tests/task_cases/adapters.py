"""Every kind of adapter on one tiny `sft` job, a base in 4 bits, and new tokens."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import is_bitsandbytes_available

from tests.small_models import byte_tokenizer
from tests.task_cases.case import Case
from tests.task_cases.language import REST, conversations, mean_loss

JOB = f"""
run: {{folder: runs/adapters, seed: 7}}
model: {{name: ./base}}
data: {{train: {{path: train.jsonl}}, validation: {{path: held_out.jsonl}}, max_length: 128, chat_template: chatml}}
task: {{name: sft}}
{REST}
"""

NO_ROWS_UNDER_ZERO3 = (
    "peft trains rows of an embedding by reading its whole weight, which ZeRO-3 has split, and gathers it on CUDA "
    "alone (TrainableTokensLayer in peft 0.21): train all rows with modules_to_save"
)
NO_ROWS_UNDER_FSDP2 = (
    "Accelerate ties weights again by the base's names, which peft's wrapper around the embedding has changed "
    "(fsdp2_prepare_model of accelerate 1.15)"
)
NO_BITS_UNDER_ZERO3 = (
    "zero.Init does not support quantized weights (bitsandbytes#1249), so every rank would hold the whole base first"
)


def base_and_rows(folder: Path) -> None:
    """Write rows, a tokenizer of bytes with some words, a small model of random weights, and an adapter on it."""
    conversations(folder)
    texts = (folder / "train.jsonl").read_text().splitlines()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(texts, special=special, size=280, additional_special_tokens=special[1:])
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(5)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    first = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in first.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    first.save_pretrained(folder / "first")


def loss_of_adapter(final: Path, folder: Path) -> float:
    """Return the mean loss over the answers' tokens, from the base as it was and what the run has exported."""
    tokenizer = AutoTokenizer.from_pretrained(final)
    if not (final / "adapter_config.json").exists():
        return mean_loss(AutoModelForCausalLM.from_pretrained(final), tokenizer, folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    if model.config.vocab_size < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return mean_loss(PeftModel.from_pretrained(model, final), tokenizer, folder)


def loss_in_4_bits(final: Path, folder: Path) -> float:
    """Return the same on a base in 4 bits."""
    kind = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=kind, dtype=torch.float32)
    return mean_loss(PeftModel.from_pretrained(model, final), AutoTokenizer.from_pretrained(final), folder)


LORA = {
    "dora": ("model.lora={rank: 4, dora: true}",),
    "rslora": ("model.lora={rank: 4, rslora: true, layers: [1], rank_pattern: {q_proj: 2}}",),
    "olora": ("model.lora={rank: 4, alpha: 4.0, init: olora}",),
}
OTHERS = {
    "ia3": (
        "model.peft={type: ia3, values: {target_modules: [k_proj, v_proj, down_proj], "
        "feedforward_modules: [down_proj]}}",
    ),
    "oft": ("model.peft={type: oft, values: {oft_block_size: 8, target_modules: all-linear}}",),
    "prompt": (
        "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4, "
        "prompt_tuning_init_text: 'reverse the words'}}",
    ),
    "continued": ("model.adapter=./first",),
    "prefix": ("model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4}}",),
}
PISSA = ("model.lora={rank: 4, alpha: 4.0, init: pissa}",)
TOKENS = "model.new_tokens={tokens: [amber], special: ['<|tool|>'], init: pieces}"
NEW_TOKENS = {"full": (TOKENS,), "lora": (TOKENS, "model.lora={rank: 4}")}
BITS = ("model.lora={rank: 4}", "model.quantization={kind: nf4, compute_dtype: float32}")

CASES = (
    Case("adapters", JOB, base_and_rows, "loss", loss_of_adapter, {**LORA, **OTHERS}, is_extra=True),
    Case("pissa", JOB, base_and_rows, "loss", loss_of_adapter, {"pissa": PISSA}),
    Case(
        "new_tokens",
        JOB,
        base_and_rows,
        "loss",
        loss_of_adapter,
        NEW_TOKENS,
        exempt={("lora", "fsdp2"): NO_ROWS_UNDER_FSDP2, ("lora", "zero3"): NO_ROWS_UNDER_ZERO3},
    ),
    *(
        [
            Case(
                "quantized",
                JOB,
                base_and_rows,
                "loss",
                loss_in_4_bits,
                {"nf4": BITS, "loftq": (BITS[0].replace("4}", "4, init: loftq}"), BITS[1])},
                exempt={(name, "zero3"): NO_BITS_UNDER_ZERO3 for name in ("nf4", "loftq")},
                is_extra=True,
            )
        ]
        if is_bitsandbytes_available()
        else []
    ),
)
