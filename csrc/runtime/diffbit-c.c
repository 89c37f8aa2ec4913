/* Continues a text: diffbit-c ARTIFACT PROMPT [OPTION VALUE]..., each option as `diffbit run` has it. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "diffbit.h"

static const char USAGE[] =
    "usage: diffbit-c ARTIFACT PROMPT [OPTION VALUE]...\n"
    "Continues a text with a model that diffbit export wrote.\n"
    "  --max-tokens N      tokens at most (512)\n"
    "  --temperature T     0: the most likely token; default: the model's own\n"
    "  --top-k K, --top-p P, --min-p P, --repetition-penalty R, --seed S\n"
    "  --threads N         default: one for each physical core\n"
    "  --print ids         prints token ids in place of text; the prompt may then be ids, too: \"@1 2 3\"\n"
    "  --stats 1           prints times to stderr\n";

static diffbit_model *model;

static void on_signal(int number) {
  (void)number;
  diffbit_cancel(model);
}

static double now(void) {
  struct timespec time;
  timespec_get(&time, TIME_UTC);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

struct output {
  int prints_ids;
  long tokens;
  double first, last;
};

static int on_token(void *data, int32_t id, const char *text, size_t bytes) {
  struct output *output = data;
  if (id >= 0) {
    output->last = now();
    if (!output->tokens++) output->first = output->last;
  }
  if (!output->prints_ids) fwrite(text, 1, bytes, stdout);
  else if (id >= 0) printf("%d ", (int)id);
  return fflush(stdout) != 0; /* nobody reads any more */
}

static int fail(const char *text) {
  fprintf(stderr, "diffbit-c: %s\n", text);
  diffbit_close(model);
  return 2;
}

int main(int count, char **words) {
  char error[512];
  diffbit_sampling sampling;
  struct output output = {0, 0, 0, 0};
  long most = 512, threads = 0;
  int prints_times = 0, i, reason;
  int32_t *ids = NULL;
  int64_t size;
  const double began = now();
  double opened, encoded;

  if (count < 3) {
    fputs(USAGE, count == 2 && !strcmp(words[1], "--help") ? stdout : stderr);
    return count == 2 && !strcmp(words[1], "--help") ? 0 : 2;
  }
  for (i = 3; i < count; i += 2)
    if (!strcmp(words[i], "--threads")) threads = i + 1 < count ? strtol(words[i + 1], NULL, 10) : 0;
  model = diffbit_open(words[1], (int)threads, error, sizeof error);
  if (!model) return fail(error);
  opened = now();
  if (diffbit_defaults(model, &sampling) < 0) return fail(diffbit_error(model));
  for (i = 3; i < count; i += 2) {
    const char *option = words[i], *value = i + 1 < count ? words[i + 1] : "";
    char *end = NULL;
    const double number = strtod(value, &end);
    if (!strcmp(option, "--print") && !strcmp(value, "ids")) {
      output.prints_ids = 1;
      continue;
    }
    if (end == value || *end) {
      snprintf(error, sizeof error, "%.100s needs a number, found \"%.100s\"", option, value);
      return fail(error);
    }
    if (!strcmp(option, "--max-tokens")) most = (long)number;
    else if (!strcmp(option, "--temperature")) sampling.temperature = number;
    else if (!strcmp(option, "--top-k")) sampling.top_k = (int32_t)number;
    else if (!strcmp(option, "--top-p")) sampling.top_p = number;
    else if (!strcmp(option, "--min-p")) sampling.min_p = number;
    else if (!strcmp(option, "--repetition-penalty")) sampling.repetition_penalty = number;
    else if (!strcmp(option, "--seed")) sampling.seed = (int64_t)number;
    else if (!strcmp(option, "--stats")) prints_times = number != 0;
    else if (strcmp(option, "--threads")) {
      snprintf(error, sizeof error, "there is no option %.100s; diffbit-c --help lists them", option);
      return fail(error);
    }
  }

  {
    const char *prompt = words[2];
    const size_t bytes = strlen(prompt);
    ids = malloc((bytes + 64) * sizeof *ids);
    if (!ids) return fail("out of memory");
    if (output.prints_ids && prompt[0] == '@') {
      char *at = words[2] + 1;
      for (size = 0; *at; ++size) ids[size] = (int32_t)strtol(at, &at, 10), at += *at == ' ';
    } else {
      size = diffbit_encode(model, prompt, bytes, 1, ids, bytes + 64);
    }
    if (size < 0) return fail(diffbit_error(model));
    if ((size_t)size > bytes + 64) return fail("the text has more tokens than bytes");
  }
  encoded = now();
  signal(SIGINT, on_signal);
  reason = diffbit_generate(model, ids, (size_t)size, most, &sampling, on_token, &output);
  free(ids);
  if (reason < 0) return fail(diffbit_error(model));
  putchar('\n');
  if (prints_times)
    fprintf(stderr, "%d threads; opened in %.1f ms, encoded in %.1f ms; %ld prompt tokens in %.1f ms; %ld tokens, %.1f tokens/s\n",
            (int)diffbit_describe(model).threads, 1e3 * (opened - began), 1e3 * (encoded - opened), (long)size,
            1e3 * (output.first - encoded), output.tokens, output.tokens > 1 ? (output.tokens - 1) / (output.last - output.first) : 0.0);
  diffbit_close(model);
  return 0;
}
