# Reads names of exported variables, a line each, and prints the first that is nearly one of
# `settings` (NAME=value words of launch.sh): with one edit of a letter, two where the setting has
# 12 letters or more (swapped neighbours are one edit), the beginning of exactly one setting, or
# Megatron's name for it. Prints nothing where there is none. What others read is left alone.

function least(a, b) { return a < b ? a : b }

function edits(a, b,   i, j, d) {
  for (i = 0; i <= length(a); i++) d[i, 0] = i
  for (j = 0; j <= length(b); j++) d[0, j] = j
  for (i = 1; i <= length(a); i++)
    for (j = 1; j <= length(b); j++) {
      d[i, j] = d[i - 1, j - 1] + (substr(a, i, 1) != substr(b, j, 1))
      d[i, j] = least(d[i, j], least(d[i - 1, j], d[i, j - 1]) + 1)
      if (i > 1 && j > 1 && substr(a, i - 1, 2) == substr(b, j, 1) substr(b, j - 1, 1))
        d[i, j] = least(d[i, j], d[i - 2, j - 2] + 1)
    }
  return d[length(a), length(b)]
}

function meant(name,   k, far, allowed, longer, long_name) {
  if (name in megatron) return megatron[name]
  if (name ~ others) return ""
  for (k = 1; k <= count; k++) {
    far = length(names[k]) - length(name)
    allowed = length(names[k]) > 11 ? 2 : length(names[k]) > 4
    if (far <= allowed && -far <= allowed && edits(name, names[k]) <= allowed) return names[k]
    if (name ~ /_/ && length(name) > 5 && index(names[k], name) == 1) {
      longer++
      long_name = names[k]
    }
  }
  return longer == 1 ? long_name : ""
}

BEGIN {
  count = split(toupper(settings), names, " ")
  for (k = 1; k <= count; k++) {
    sub(/=.*/, "", names[k])
    known[names[k]]
  }
  others = "^(CUDA|NCCL|SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|UCX|TORCH|PYTORCH|NVIDIA|DS|OMP|MKL|GLOO"
  others = others "|LOCAL|GROUP|ROLE|WANDB|HF|LC|XDG|SSH|CI|GIT|PIP|CONDA|BASH|PYTHON|LD)_"
  others = others "|^NUM_CPUS$"
  split("NUM_ATTENTION_HEADS NUM_ATTN_HEADS NUM_KEY_VALUE_HEADS NUM_KV_HEADS " \
    "NUM_QUERY_GROUPS NUM_KV_HEADS MICRO_BATCH_SIZE BATCH_SIZE TP_SIZE MP_SIZE CP_SIZE SP_SIZE " \
    "TENSOR_MODEL_PARALLEL_SIZE MP_SIZE PIPELINE_MODEL_PARALLEL_SIZE PP_SIZE " \
    "DS_SEQUENCE_PARALLEL_SIZE SP_SIZE", pairs, " ")
  for (k = 1; k in pairs; k += 2) megatron[pairs[k]] = pairs[k + 1]
}

/^[A-Z][A-Z0-9_]+$/ && !($0 in known) && (setting = meant($0)) {
  print $0 " is no setting; did you mean " setting "?"
  exit
}
