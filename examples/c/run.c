/* Continues a text: cc run.c -I csrc/runtime -L build/c/runtime -ldiffbit -Wl,-rpath,build/c/runtime -o run && ./run runtime/nano "def main(" */
#include <stdio.h>
#include <string.h>

#include "diffbit.h"

static int print(void *data, int32_t id, const char *text, size_t bytes) {
  (void)data, (void)id;
  return fwrite(text, 1, bytes, stdout) != bytes; /* another result than 0 stops the text */
}

int main(int count, char **words) {
  char error[512];
  int32_t ids[4096];
  diffbit_model *model = count == 3 ? diffbit_open(words[1], 0, error, sizeof error) : NULL;
  if (!model) return fprintf(stderr, "%s\n", count == 3 ? error : "usage: run ARTIFACT PROMPT"), 2;
  const int64_t size = diffbit_encode(model, words[2], strlen(words[2]), 1, ids, 4096);
  const int reason = size < 0 || size > 4096 ? -1 : diffbit_generate(model, ids, (size_t)size, 100, NULL, print, NULL);
  if (reason < 0) fprintf(stderr, "%s\n", diffbit_error(model));
  diffbit_close(model);
  return reason < 0 ? 2 : 0;
}
