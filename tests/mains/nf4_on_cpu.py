"""train.py with model.quantization on CPU, where it is refused, for test_lora.py. What packs
weights for evaluation, on CPUs with AVX-512, is left out.
"""

from bitsandbytes.nn import modules


def main(config, dry_run):
    """As engine_logits.main."""
    import engine_logits

    from zerotrain.training import setup

    setup.check_machine = lambda *_: None
    modules.has_avx512bf16 = lambda: False
    engine_logits.main(config, dry_run)
