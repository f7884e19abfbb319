"""Every flag of Megatron-DeepSpeed, and what becomes of it where sequences are spread."""

from __future__ import annotations

import ast
from pathlib import Path

# Refused on every rank before groups exist; an example that is.
REFUSED = {
    "--attention-dropout": "0.1",
    "--contigious-checkpointing": "--checkpoint-activations --deepspeed-activation-checkpointing",
    "--cpu_torch_adam": "--cpu-optimizer --optimizer adam --lr 0.001 --clip-grad 0",
    "--data-efficiency-curriculum-learning": "",
    "--distribute-saved-activations": "",
    "--distribute-checkpointed-activations": "",
    "--ds-inference": "",
    "--ds-sequence-parallel-fpdt": "",
    "--inference": "",
    "--init-method-xavier-uniform": "",
    "--kd": "",
    "--lazy-mpu-init": "1",
    "--log-params-norm": "",
    "--mos": "",
    "--num-experts": "2",
    "--num-experts-switch": "2",
    "--random-ltd": "",
    "--retro-add-retriever": "",
    "--sequence-parallel": "",
    "--transformer-impl": "transformer_engine",
}
# Read with a refused flag alone, or refused under conditions that test_mds_refusals.py holds.
WITH_REFUSED = """
    --mlp-type --topk --expert-interval --disable-moe-token-dropping --moe-train-capacity-factor
    --moe-eval-capacity-factor --moe-min-capacity --moe-loss-coeff --create-moe-param-group
    --disable-moe-top2-2nd-expert-sampling --use-tutel --enable-expert-tensor-parallelism
    --moe-expert-parallel-size --ds-sequence-parallel-fpdt-chunk-size
    --ds-sequence-parallel-fpdt-offloading --num-layers-teacher --num-experts-teacher
    --hidden-size-teacher --num-attention-heads-teacher --kd-alpha-ce --kd-beta-ce --kd-temp
    --reset-iteration --load-teacher --inference-batch-times-seqlen-threshold --max-tokens-to-oom
    --output-bert-embeddings --bert-embedder-type --fp8-e4m3 --fp8-hybrid --no-fp8-wgrad
    --fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo --retro-workdir
    --retro-cyclic-train-iters --retro-encoder-layers --retro-encoder-hidden-dropout
    --retro-encoder-attention-dropout --retro-num-neighbors --retro-num-retrieved-chunks
    --retro-return-doc-ids --num-layers-per-virtual-pipeline-stage --overlap-p2p-communication
    --train-idx-path --train-desc-path --train-doc-idx-path --train-sample-idx-path
    --train-shuffle-idx-path --checkpoint-in-cpu --partition-activations
"""
# What they ask of attention is so here without them: scores and softmax are computed in fp32, and
# not kept. A flash attention that cannot serve is said (test_mds_refusals.py).
SATISFIED = """
    --attention-softmax-in-fp32 --no-query-key-layer-scaling --no-masked-softmax-fusion
    --recompute-activations --recompute-granularity --use-flash-attn-v1 --use-flash-attn-v2
    --use-flash-attn-triton --use-flash-attn-builder --no-bias-dropout-fusion
    --force-ds-sequence-parallel
"""
# pretrain_gpt.py under --deepspeed does not read them, sequences spread or not.
NOT_READ = """
    --encoder-num-layers --decoder-num-layers --bert-no-binary-head --onnx-safe
    --enable-zbh1-exact-semantics --DDP-impl --no-contiguous-buffers-in-local-ddp
    --no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p --standalone-embedding-stage
    --pipeline-model-parallel-split-rank --use-distributed-optimizer --encoder-seq-length
    --decoder-seq-length --retriever-seq-length --sample-rate --mask-prob --short-seq-prob
    --vocab-extra-ids --ict-head-size --biencoder-projection-dim
    --biencoder-shared-query-context-model --ict-load --bert-load --titles-data-path
    --query-in-block-prob --use-one-sent-docs --evidence-data-path
    --retriever-report-topk-accuracies --retriever-score-scaling --block-data-path --embedding-path
    --indexer-batch-size --indexer-log-interval --num-classes --img-h --img-w --num-channels
    --patch-dim --classes-fraction --data-per-class-fraction --no-data-sharding --head-lr-mult
    --vision-pretraining --vision-pretraining-type --vision-backbone-type --swin-backbone-type
    --mask-type --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number
    --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer --dino-norm-last-layer
    --dino-warmup-teacher-temp --dino-teacher-temp --dino-warmup-teacher-temp-epochs
    --scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor
    --accumulate-allreduce-grads-in-fp32
"""
# Old names that the host's own checks refuse, before it makes groups.
REFUSED_BY_HOST = "--batch-size --warmup --model-parallel-size"
# The host's own code reads them, and the patches leave it in place: as with one rank a sequence.
OBEYED = """
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-key-value-heads
    --kv-channels --max-position-embeddings --use-rotary-position-embeddings
    --rotary-position-embeddings-theta --rotary-percent --no-position-embedding
    --make-vocab-size-divisible-by --normalization --layernorm-epsilon --disable-mem-efficient-ln
    --apply-residual-connection-post-layernorm --openai-gelu --squared-relu --swiglu
    --untie-embeddings-and-output-weights --embedding-weights-in-fp32 --kill-switch-file
    --hidden-dropout --weight-decay --start-weight-decay --end-weight-decay
    --weight-decay-incr-style --clip-grad --adam-beta1 --adam-beta2 --adam-eps --sgd-momentum
    --micro-batch-size --global-batch-size --rampup-batch-size --recompute-method
    --recompute-num-layers --enable-zbh1-pipeline --checkpoint-activations --train-iters
    --train-samples --train-tokens --log-interval --exit-interval --exit-duration-in-mins
    --exit-signal-handler --tensorboard-dir --no-bias-gelu-fusion --disable-bias-linear --optimizer
    --dataloader-type --cpu-optimizer --ds_fused_adam --no-pipeline-parallel
    --no-async-tensor-model-parallel-allreduce --no-persist-layer-norm --ds-sequence-parallel-size
    --no-gradient-accumulation-fusion --use-dataset-only --seed --data-parallel-random-init
    --init-method-std --lr --lr-decay-style --lr-decay-iters
    --lr-decay-samples --lr-decay-tokens --lr-warmup-fraction --lr-warmup-iters
    --lr-warmup-samples --lr-warmup-tokens --min-lr --override-opt_param-scheduler
    --use-checkpoint-opt_param-scheduler --save --save-interval --no-save-optim --no-save-rng
    --load --load-tag --no-load-optim --no-load-rng --no-load-lr-state --finetune
    --no-initialization --use-checkpoint-args --exit-on-missing-checkpoint --universal-checkpoint
    --fp16 --bf16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window
    --hysteresis --fp32-residual-connection --fp16-lm-cross-entropy --tensor-model-parallel-size
    --pipeline-model-parallel-size --distributed-backend --distributed-timeout-minutes --local_rank
    --use-cpu-initialization --empty-unused-memory-level --eval-iters --eval-interval --skip-train
    --aml-data-download-path --data-path --split --train-data-path --valid-data-path
    --test-data-path --data-cache-path --vocab-size --vocab-file --merge-file --seq-length
    --mmap-warmup --num-workers --tokenizer-type --tokenizer-model --trust-remote-code --data-impl
    --reset-position-ids --reset-attention-mask --eod-mask-loss --train-data-exact-num-epochs
    --return-data-index --repeated-dataloader --adlr-autoresume --adlr-autoresume-interval
    --log-num-zeros-in-grad --timing-log-level --no-barrier-with-level-1-timing
    --timing-log-option --tensorboard-log-interval --tensorboard-queue-size
    --log-timers-to-tensorboard --log-batch-size-to-tensorboard
    --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-optimizer-states-to-tensorboard
    --log-memory-to-tensorboard --log-world-size-to-tensorboard --wandb-project --wandb-exp-name
    --wandb-save-dir --zero-stage --zero-reduce-scatter --zero-contigious-gradients
    --zero-reduce-bucket-size --zero-allgather-bucket-size --remote-device --use-pin-memory
    --deepspeed-activation-checkpointing --synchronize-each-layer --profile-backward --profile
    --profile_steps --profile-ranks --apply-layernorm-1p --checkpoint-num-layers
"""
CLASSES = {
    "refused": tuple(REFUSED),
    "with a refused one": tuple(WITH_REFUSED.split()),
    "refused by the host": tuple(REFUSED_BY_HOST.split()),
    "satisfied": tuple(SATISFIED.split()),
    "not read": tuple(NOT_READ.split()),
    "obeyed": tuple(OBEYED.split()),
}


def flags_of(checkout: Path) -> list[tuple[str, ...]]:
    """Every flag that the host's parser adds, with its other names."""
    tree = ast.parse((checkout / "megatron" / "arguments.py").read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    added = (call for call in calls if getattr(call.func, "attr", "") == "add_argument")
    return [
        tuple(name.value for name in call.args if isinstance(name, ast.Constant)) for call in added
    ]
