. /tmp/u41/env.sh; cd /tmp/u41/cwd/moved
 python $W/eval.py run --eval-data ../data2/validation; python $W/train.py --resume --out run --data ../data2/train --eval-data ../data2/validation --steps 4
 cp -r run "../cö py"; cd ..; python $W/eval.py "cö py" --eval-data data2/validation; python $W/eval.py "cö py" --data data2/train
 python $W/eval.py sample "cö py" --prompt "import os" --tokens 20
 python $W/eval.py sample "cö py" --prompt "import os" --tokens 20 --json
 python $W/eval.py sample "cö py" --prompt "" --tokens 20
 PYTHONPATH=$W python -m training.huggingface export "cö py" "ex p" ; ls "ex p"
 python $W/eval.py diagnose "cö py" --eval-data data2/validation --batches 1 --batch-size 2 --out "dia g"; ls "dia g"
 python $W/eval.py report "cö py" --out "p q.html" ; ls 
 mv data2/train.bin x; python $W/eval.py "cö py" ;  mv x data2/train.bin
 chmod -R a-w "cö py"; python $W/eval.py "cö py" --batches 1
