"""Adapters that make Mega MoE a setting of a trainer; one file per trainer, each imported by its user and importing its trainer itself.

transformers.py  Hugging Face transformers (experts_implementation="mega_moe")     _buffers.py  the buffers that layers of one shape share
torchtitan.py    TorchTitan (override of its RoutedExperts)                        prime_rl.py  prime-rl ([trainer.model.moe.dispatch])
_gradients.py    FP32 main gradients, clipping by one norm               _sharding.py    experts as DTensors, FSDP2, full state dicts
"""
