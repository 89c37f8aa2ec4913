/* Continues a text, or talks: diffbit-c ARTIFACT (PROMPT | --chat) [OPTION VALUE]..., each option as `diffbit run` has it. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "diffbit.h"

static const char USAGE[] =
    "usage: diffbit-c ARTIFACT PROMPT [OPTION VALUE]...\n"
    "       diffbit-c ARTIFACT --chat [OPTION VALUE]...\n"
    "Continues a text with a model that diffbit export wrote, or answers each line of stdin.\n"
    "  --max-tokens N      tokens at most (512)\n"
    "  --temperature T     0: the most likely token; default: the model's own\n"
    "  --top-k K, --top-p P, --min-p P, --repetition-penalty R, --seed S\n"
    "  --system TEXT       a system message, with --chat\n"
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

static int fail(const char *text) {
  fprintf(stderr, "diffbit-c: %s\n", text);
  diffbit_close(model);
  return 2;
}

struct options {
  diffbit_sampling sampling;
  long long most_tokens, threads;
  int prints_ids, prints_times;
  const char *system;
};

/* Reads a number; 0: the value is none from `least` to `most`, and `error` says so. */
static int read_number(const char *option, const char *value, double least, double most, double *number, char *error, size_t bytes) {
  char *end = NULL;
  *number = strtod(value, &end);
  if (end != value && !*end && *number >= least && *number <= most) return 1;
  snprintf(error, bytes, "%.100s needs a number from %g to %g, found \"%.100s\"", option, least, most, value);
  return 0;
}

/* Reads the options; `sampling` are those of the model. 0: `error` says what is wrong. */
static int read_options(int count, char **words, struct options *options, char *error, size_t bytes) {
  int i;
  for (i = 0; i < count; i += 2) {
    const char *option = words[i], *value = i + 1 < count ? words[i + 1] : "";
    double number = 0;
    int is_known = 1;
#define IS(name, least, most) (!strcmp(option, name) && (is_known = read_number(option, value, least, most, &number, error, bytes), 1))
    if (!strcmp(option, "--print")) {
      options->prints_ids = !strcmp(value, "ids");
      if (!options->prints_ids) return snprintf(error, bytes, "--print needs ids, found \"%.100s\"", value), 0;
    } else if (!strcmp(option, "--system")) options->system = value;
    else if (IS("--max-tokens", 1, 1 << 30)) options->most_tokens = (long long)number;
    else if (IS("--threads", 0, 1024)) options->threads = (long long)number;
    else if (IS("--temperature", 0, 1e6)) options->sampling.temperature = number;
    else if (IS("--top-k", 0, 1 << 30)) options->sampling.top_k = (int32_t)number;
    else if (IS("--top-p", 0, 1)) options->sampling.top_p = number;
    else if (IS("--min-p", 0, 1)) options->sampling.min_p = number;
    else if (IS("--repetition-penalty", 1e-6, 1e6)) options->sampling.repetition_penalty = number;
    else if (IS("--seed", -1, 9007199254740992.0)) options->sampling.seed = (int64_t)number;
    else if (IS("--stats", 0, 1)) options->prints_times = number != 0;
    else return snprintf(error, bytes, "there is no option %.100s; diffbit-c --help lists them", option), 0;
    if (!is_known) return 0;
  }
  return 1;
}

struct output {
  int prints_ids;
  long tokens;
  double first, last;
  char *text; /* of the answer, if it is kept; its end is no zero */
  size_t bytes, room;
};

static int on_token(void *data, int32_t id, const char *text, size_t bytes) {
  struct output *output = data;
  if (id >= 0) {
    output->last = now();
    if (!output->tokens++) output->first = output->last;
  }
  if (output->text && bytes <= output->room - output->bytes) {
    memcpy(output->text + output->bytes, text, bytes);
    output->bytes += bytes;
  }
  if (!output->prints_ids) fwrite(text, 1, bytes, stdout);
  else if (id >= 0) printf("%d ", (int)id);
  return fflush(stdout) != 0; /* nobody reads any more */
}

/* Generates after the ids; a negative result: it failed. */
static int answer(const int32_t *ids, size_t size, const struct options *options, struct output *output) {
  const double began = now();
  int reason;
  signal(SIGINT, on_signal); /* ends the answer; elsewhere it ends the program */
  reason = diffbit_generate(model, ids, size, options->most_tokens, &options->sampling, on_token, output);
  signal(SIGINT, SIG_DFL);
  if (reason < 0) return reason;
  putchar('\n');
  fflush(stdout);
  if (options->prints_times)
    fprintf(stderr, "%d threads; %ld prompt tokens in %.1f ms; %ld tokens, %.1f tokens/s\n", (int)diffbit_describe(model).threads, (long)size,
            1e3 * (output->first - began), output->tokens,
            output->tokens > 1 ? (double)(output->tokens - 1) / (output->last - output->first) : 0.0);
  return reason;
}

/* Reads "1 2 3" as ids, of which there is room for one a byte; -1: it is no list of them. */
static int64_t read_ids(char *at, int32_t *ids) {
  int64_t size = 0;
  while (*at) {
    char *end = NULL;
    const long id = strtol(at, &end, 10);
    if (end == at || (*end && *end != ' ') || id < 0 || id > INT32_MAX) return -1;
    ids[size++] = (int32_t)id;
    at = end + (*end == ' ');
  }
  return size;
}

static int continue_text(char *prompt, const struct options *options) {
  const size_t room = strlen(prompt) + 64;
  int32_t *ids = malloc(room * sizeof *ids);
  struct output output = {options->prints_ids, 0, 0, 0, NULL, 0, 0};
  int64_t size;
  int reason;
  if (!ids) return fail("out of memory");
  const int has_ids = options->prints_ids && prompt[0] == '@';
  size = has_ids ? read_ids(prompt + 1, ids) : diffbit_encode(model, prompt, strlen(prompt), 1, ids, room);
  if (size < 0 || (size_t)size > room) {
    free(ids);
    return fail(has_ids ? "the prompt is no list of token ids such as \"@1 2 3\"" : size < 0 ? diffbit_error(model) : "the text has more tokens than bytes");
  }
  reason = answer(ids, (size_t)size, options, &output);
  free(ids);
  return reason < 0 ? fail(diffbit_error(model)) : 0;
}

/* The oldest two messages after the system's are dropped while the others leave no room for an answer. */
enum { MOST_MESSAGES = 1024, LINE_BYTES = 1 << 16 };

static void drop(diffbit_message *messages, size_t *count, size_t first, size_t number) {
  size_t i;
  for (i = first; i < first + number; ++i) free((char *)messages[i].content);
  memmove(messages + first, messages + first + number, (*count - first - number) * sizeof *messages);
  *count -= number;
}

static char *copy_of(const char *text, size_t bytes) {
  char *copy = malloc(bytes + 1);
  if (!copy) exit(fail("out of memory"));
  return memcpy(copy, text, bytes);
}

static int chat(const struct options *options) {
  const int64_t context = diffbit_describe(model).context, most = options->most_tokens < context / 4 ? options->most_tokens : context / 4;
  const size_t first = options->system != NULL;
  static diffbit_message messages[MOST_MESSAGES + 2];
  static char line[LINE_BYTES], reply[LINE_BYTES];
  int32_t *ids = malloc((size_t)context * sizeof *ids);
  size_t count = 0;
  int result = ids ? 0 : fail("out of memory");
  if (ids && first) messages[count++] = (diffbit_message){"system", copy_of(options->system, strlen(options->system)), strlen(options->system)};
  while (!result && fputs("> ", stderr) >= 0 && fgets(line, sizeof line, stdin)) {
    const size_t bytes = strcspn(line, "\r\n");
    struct output output = {options->prints_ids, 0, 0, 0, reply, 0, sizeof reply};
    int64_t size;
    if (!bytes) continue;
    messages[count++] = (diffbit_message){"user", copy_of(line, bytes), bytes};
    while ((size = diffbit_chat(model, messages, count, ids, (size_t)context)) >= 0 && (size + most > context || count > MOST_MESSAGES) && count > first + 2)
      drop(messages, &count, first, 2);
    if (size > context) {
      fprintf(stderr, "the message takes %lld tokens, but the context holds %lld; shorten it\n", (long long)size, (long long)context);
      drop(messages, &count, count - 1, 1);
      continue;
    }
    if (size < 0 || answer(ids, (size_t)size, options, &output) < 0) result = fail(diffbit_error(model));
    else messages[count++] = (diffbit_message){"assistant", copy_of(reply, output.bytes), output.bytes};
  }
  drop(messages, &count, 0, count);
  free(ids);
  return result;
}

int main(int count, char **words) {
  char error[512];
  struct options options = {{0}, 512, 0, 0, 0, NULL};
  const double began = now();
  int result;

  if (count < 3) {
    const int is_help = count == 2 && !strcmp(words[1], "--help");
    fputs(USAGE, is_help ? stdout : stderr);
    return is_help ? 0 : 2;
  }
  if (!read_options(count - 3, words + 3, &options, error, sizeof error)) return fail(error); /* before the model is opened */
  model = diffbit_open(words[1], (int)options.threads, error, sizeof error);
  if (!model) return fail(error);
  if (diffbit_defaults(model, &options.sampling) < 0) return fail(diffbit_error(model));
  read_options(count - 3, words + 3, &options, error, sizeof error);
  if (options.prints_times) fprintf(stderr, "opened in %.1f ms\n", 1e3 * (now() - began));
  result = strcmp(words[2], "--chat") ? continue_text(words[2], &options) : chat(&options);
  if (!result) diffbit_close(model);
  return result;
}
