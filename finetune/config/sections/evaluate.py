"""`evaluate:` - what is measured on the validation rows, and when."""

from finetune.config.section import BatchSize, Count, Length, Positive, Section, Strings, key


class GenerateSection(Section):
    """Greedy generation for validation prompts."""

    num_samples: Positive = key("Number of validation prompts.", 64)
    max_new_tokens: Length = key("Maximum length of an answer in tokens.", 128)
    show: Count = key("Number of answers that are printed with their references.", 3)
    metrics: Strings = key(
        "`exact_match`, or `package.module:function` taking (answers, references) and returning a number.",
        ("exact_match",),
    )
    batch_size: BatchSize = key("Prompts per batch and process.", 8)


class EvaluateSection(Section):
    """What is measured on the validation rows, and when."""

    every_steps: Positive | None = key("Evaluate every N steps; unset, only at the end.", None)
    at_start: bool = key("Also evaluate before the first step.", False)
    microbatch_size: BatchSize | None = key(
        "Samples, packs or batches per forward pass and process; unset, `train.microbatch_size`.", None
    )
    generate: GenerateSection | None = key("Generate answers to validation prompts and score them.", None)
