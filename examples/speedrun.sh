#!/usr/bin/env bash
# From text to a trained, reported and exported model:
#
#   bash examples/speedrun.sh [--tiny] [FOLDER [TEXT ...]]
#
# FOLDER (speedrun) must not exist yet, or hold an interrupted speedrun, which goes on. TEXT is what
# `python -m training.tokenize --input` takes; by default the source of Python and of its installed packages, some
# 200 MB, of which --tiny takes the standard library alone. Needs the extra `data` (`uv run` has it).
#
# Expect of --tiny, on two CPU cores: 80 s of processor time in all, of which most compiles. The tiny Llama of 1.05
# million parameters reads 102,400 tokens of 4.3 million in 100 steps; its validation loss is about 5.4 nats a token,
# 2.8 bits per byte, and its text nearly noise. Without --tiny, on one H200 with 32 cores: 7 minutes, of which 4,000
# steps of the 125m on 131 million tokens take 4; 25,000 files with PyTorch's and JAX's among them are 107 million
# tokens, of which the validation loss is 1.665 nats, 0.646 bits per byte.
#
# FOLDER/report.html has the curves, FOLDER/export the model for transformers, with its linear layers in MXFP4.
set -euo pipefail
tiny=
if [ "${1-}" = --tiny ]; then
  tiny=1
  shift
fi
out=$(realpath -m "${1-speedrun}")
text=()
for name in "${@:2}"; do
  case $name in /*) text+=("$name") ;; *) text+=("$PWD/$name") ;; esac
done
cd "$(dirname "$0")/.."
if [ "$tiny" ]; then
  vocabulary=1024
  size=(--model tiny --steps 100 --batch-size 8 --seq-len 128 --warmup-steps 10)
  size+=(--eval-every 50 --eval-batches 8 --stats-every 50)
else
  vocabulary=32000
  size=(--model 125m --steps 4000 --batch-size 64 --seq-len 512 --lr 2e-3 --warmup-steps 200)
  size+=(--eval-every 500 --eval-batches 20 --stats-every 1000 --checkpoint-every 2000)
fi

step() { printf '== %s s: %s\n' "$SECONDS" "$1"; }

mkdir -p "$out"
if [ ${#text[@]} -eq 0 ]; then
  step "the source"
  text=("$out/source")
  [ -e "${text[0]}" ] || python - "${text[0]}" "$tiny" <<'PYTHON'
import concurrent.futures, json, os, pathlib, shutil, sys, sysconfig, zlib

out, tiny = sys.argv[1:]
paths = sysconfig.get_paths()
roots = [pathlib.Path(paths["stdlib"]), *([] if tiny else [pathlib.Path(paths["purelib"])])]
left_out = {"site-packages", *(["test", "tests"] if tiny else [])}
found = {str(path.relative_to(root)): path for root in roots for path in root.rglob("*.py")}
names = [name for name in found if left_out.isdisjoint(pathlib.Path(name).parts)]
names.sort(key=lambda name: zlib.crc32(name.encode()))  # so that the last files, for evaluation, are any
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    texts = list(pool.map(lambda name: found[name].read_text(errors="ignore"), names))
folder = pathlib.Path(f"{out}.partial")
shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
folder.mkdir()
size = len(texts) // (n_files := 4 if tiny else 32) + 1  # one process tokenizes a file
for i in range(n_files):
    lines = [json.dumps({"text": text}) + "\n" for text in texts[i * size : (i + 1) * size] if text]
    (folder / f"{i:02}.jsonl").write_text("".join(lines))
os.rename(folder, out)
PYTHON
fi
step "tokens"
python -m training.tokenize --input "${text[@]}" --output "$out/tokens" --append-eod \
  --train-tokenizer --vocab-size "$vocabulary"

step "training"
if [ -e "$out/run/config.json" ]; then
  python train.py --resume --out "$out/run"
else
  python train.py --policy wgrad_hadamard --data "$out/tokens" "${size[@]}" --out "$out/run"
fi

step "the report, a sample, the export"
python eval.py report "$out/run" --out "$out/report.html" --prompts 'import ' 'def '
python eval.py sample "$out/run" --prompt 'class ' --tokens 64 --temperature 0.8
[ -e "$out/export" ] || python -m training.huggingface export "$out/run" "$out/export" --quantize mxfp4
step "done"
