"""Turns text into a Megatron indexed dataset, in parallel: PREFIX.bin, .idx and .tokenizer.json.

    python -m training.tokenize --input 'DIR/c4-train.*.json.gz' --tokenizer FILE --output PREFIX

Documents keep their order: that of the files' names, and that in the file. What is left out is listed, with
file and line, in PREFIX.problems.txt and counted in PREFIX.json. Interrupted, even killed, the same command
goes on: finished files are kept in PREFIX.partial until PREFIX.bin and .idx are there as a whole.
"""

from training.tokenize.tokenize import main

if __name__ == "__main__":
    main()
