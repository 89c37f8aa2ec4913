// The C interface: no exception leaves it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "../ort/op.h"
#include "chat.h"
#include "diffbit.h"
#include "sampler.h"
#include "session.h"
#include "tokenizer.h"

using namespace diffbit;
using namespace diffbit::runtime;

struct diffbit_model {
  diffbit_model(const std::string& folder, int threads) : session(folder, threads) {}

  Session session;
  std::unique_ptr<Tokenizer> tokenizer;
  std::vector<int32_t> ids;   // of the text
  size_t prompt = 0;          // how many of them were given
  const float* logits = nullptr;
  Sampler sampler;
  bool is_seeded = false;
  int32_t end_of_answer = -1;
  std::string error;
  bool was_cancelled = false;

  Tokenizer& tokens() {
    if (!tokenizer) {
      const std::string path = session.file("tokenizer.json");
      if (path.empty()) throw Error("the artifact has no tokenizer.json; export the model with --tokenizer");
      constexpr uint64_t MOST_BYTES = 256 << 20;
      tokenizer = std::make_unique<Tokenizer>(MappedFile(path, MOST_BYTES).text(), path);
    }
    return *tokenizer;
  }
  /// Returns a listed file as JSON, or null where there is none.
  Json json(const char* name) const {
    const std::string path = session.file(name);
    if (path.empty()) return Json();
    constexpr uint64_t MOST_BYTES = 64 << 20;
    return Json(MappedFile(path, MOST_BYTES).text(), path);
  }
  void begin(const int32_t* given, size_t count) {
    std::vector<int32_t> text(given, given + count);
    if (text.empty()) {
      if (session.bos() < 0) throw Error("the prompt is empty and the model has no bos token to start from; give it some text");
      text = {static_cast<int32_t>(session.bos())};
    }
    if (text.size() > static_cast<size_t>(session.context()))
      throw Error("the prompt has %zu tokens, the model's context holds %lld; shorten the prompt", text.size(), number(session.context()));
    logits = nullptr;
    const size_t cached = session.reuse(text.data(), text.size());
    logits = session.append(text.data() + cached, text.size() - cached);
    prompt = text.size();
    ids = std::move(text);
    is_seeded = false;
  }
  int32_t next(const diffbit_sampling& sampling) {
    if (!logits) throw Error("there is no prompt; call diffbit_prompt first");
    if (session.length() < ids.size()) {  // the token that was chosen last
      const int32_t last = ids.back();
      logits = nullptr;
      logits = session.append(&last, 1);
    }
    if (!is_seeded) sampler.seed(sampling.seed);
    is_seeded = true;
    const int32_t id = sampler.choose(logits, session.vocabulary(), ids, prompt, sampling);
    ids.push_back(id);
    return id;
  }
  diffbit_sampling defaults() const {
    const Json config = json("generation_config.json");
    return sampling_of(config.root());
  }
};

namespace {

/// Writes as many values as there is room for; returns how many there are.
template <class Values, class Value>
int64_t copied(const Values& found, Value* to, size_t room) {
  std::copy_n(found.begin(), std::min(room, found.size()), to);
  return static_cast<int64_t>(found.size());
}

/// Runs body and returns what it does; -1, and the reason in the model, for an exception.
template <class Body>
auto guarded(diffbit_model* model, const Body& body) -> decltype(body()) {
  using Result = decltype(body());
  model->was_cancelled = false;
  try {
    try {
      return body();
    } catch (const Cancelled&) {
      model->session.cancelled = false;
      model->was_cancelled = true;
      model->error = "the call was cancelled";
    } catch (const std::bad_alloc&) {
      model->error = "out of memory";
    } catch (const std::exception& error) {
      model->error = error.what();
    }
  } catch (...) {  // there is no memory for the message
    model->error.clear();
  }
  return static_cast<Result>(-1);
}

/// The text of tokens that arrive one by one, whole characters only (runtime/tokenizer.py explains the window).
class TextStream {
 public:
  TextStream(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt) : tokenizer_(tokenizer) {
    constexpr size_t CONTEXT = 8;
    window_.assign(prompt.end() - static_cast<std::ptrdiff_t>(std::min(prompt.size(), CONTEXT)), prompt.end());
    complete_ = window_.size();
    returned_ = whole(decoded());
  }
  std::string push(int32_t id) {
    window_.push_back(id);
    const std::string text = decoded();
    const size_t end = whole(text);
    const std::string more = end > returned_ ? text.substr(returned_, end - returned_) : "";
    returned_ = std::max(returned_, end);
    if (!more.empty() && end == text.size()) {
      window_.erase(window_.begin(), window_.begin() + static_cast<std::ptrdiff_t>(complete_));
      returned_ = decoded().size();
      complete_ = window_.size();
    }
    return more;
  }
  std::string finish() {
    const std::string text = decoded();
    const std::string more = text.size() > returned_ ? text.substr(returned_) : "";
    returned_ = text.size();
    return more;
  }

 private:
  std::string decoded() const { return tokenizer_.decode(window_.data(), window_.size()); }
  static size_t whole(const std::string& text) {
    size_t end = text.size();
    while (end >= 3 && !text.compare(end - 3, 3, "\xef\xbf\xbd")) end -= 3;
    return end;
  }
  const Tokenizer& tokenizer_;
  std::vector<int32_t> window_;
  size_t complete_, returned_;
};

}  // namespace

diffbit_model* diffbit_open(const char* folder, int threads, char* error, size_t error_bytes) {
  const auto report = [&](const char* text) {
    if (!error || !error_bytes) return;
    const size_t size = std::min(std::strlen(text), error_bytes - 1);
    std::memcpy(error, text, size);
    error[size] = 0;
  };
  try {
    constexpr int MOST_THREADS = 1024;
    if (!folder || threads < 0 || threads > MOST_THREADS) throw Error("diffbit_open needs a folder, and 0 to %d threads", MOST_THREADS);
    report("");
    return new diffbit_model(folder, threads);
  } catch (const std::bad_alloc&) {
    report("out of memory");
  } catch (const std::exception& failure) {
    report(failure.what());
  } catch (...) {
    report("it failed");
  }
  return nullptr;
}

void diffbit_close(diffbit_model* model) { delete model; }

const char* diffbit_error(const diffbit_model* model) { return model->error.c_str(); }

diffbit_about diffbit_describe(const diffbit_model* model) {
  const Session& session = model->session;
  return {session.context(), session.vocabulary(), static_cast<int64_t>(session.length()), static_cast<int32_t>(session.bos()), session.threads()};
}

int diffbit_defaults(diffbit_model* model, diffbit_sampling* sampling) {
  return guarded(model, [&] {
    *sampling = model->defaults();
    return 0;
  });
}

int64_t diffbit_encode(diffbit_model* model, const char* text, size_t bytes, int special, int32_t* ids, size_t room) {
  return guarded(model, [&] { return copied(model->tokens().encode({text, bytes}, special != 0), ids, room); });
}

int64_t diffbit_decode(diffbit_model* model, const int32_t* ids, size_t count, char* text, size_t room) {
  return guarded(model, [&] { return copied(model->tokens().decode(ids, count), text, room); });
}

int64_t diffbit_chat(diffbit_model* model, const diffbit_message* messages, size_t count, int32_t* ids, size_t room) {
  return guarded(model, [&] {
    const JsonValue chat = model->session.chat();
    const std::string text = conversation(chat, messages, count);
    model->end_of_answer = model->tokens().id(chat["end"].text());
    return copied(model->tokens().encode(text, false), ids, room);  // the template writes the special tokens itself
  });
}

int diffbit_prompt(diffbit_model* model, const int32_t* ids, size_t count) {
  return guarded(model, [&] {
    model->begin(ids, count);
    return 0;
  });
}

const float* diffbit_logits(diffbit_model* model) {
  const int failed = guarded(model, [&] {
    if (model->logits && model->session.length() < model->ids.size()) {
      const int32_t last = model->ids.back();
      model->logits = nullptr;
      model->logits = model->session.append(&last, 1);
    }
    if (!model->logits) throw Error("there is no prompt; call diffbit_prompt first");
    return 0;
  });
  return failed ? nullptr : model->logits;
}

int32_t diffbit_next(diffbit_model* model, const diffbit_sampling* sampling) {
  return guarded(model, [&] { return model->next(sampling ? *sampling : model->defaults()); });
}

int diffbit_is_end(const diffbit_model* model, int32_t id) {
  return id >= 0 && (id == model->end_of_answer || model->session.ends().count(id));
}

int diffbit_generate(diffbit_model* model, const int32_t* ids, size_t count, int64_t most_tokens, const diffbit_sampling* sampling,
                     diffbit_on_token on_token, void* data) {
  const int reason = guarded(model, [&]() -> int {
    if (most_tokens < 1) throw Error("most_tokens is %lld, wanted at least 1", number(most_tokens));
    const diffbit_sampling chosen = sampling ? *sampling : model->defaults();
    const Tokenizer& tokenizer = model->tokens();
    model->begin(ids, count);
    TextStream stream(tokenizer, model->ids);
    int ended = -1;
    for (int64_t made = 1; ended < 0; ++made) {
      const int32_t id = model->next(chosen);
      const bool is_end = diffbit_is_end(model, id);
      const std::string text = is_end ? "" : stream.push(id);
      if (on_token && on_token(data, id, text.data(), text.size())) return DIFFBIT_STOPPED;
      if (is_end) ended = DIFFBIT_END;
      else if (made >= most_tokens) ended = DIFFBIT_LENGTH;
      else if (model->ids.size() > static_cast<size_t>(model->session.context())) ended = DIFFBIT_CONTEXT;
    }
    const std::string rest = stream.finish();
    if (on_token && !rest.empty()) on_token(data, -1, rest.data(), rest.size());
    return ended;
  });
  return model->was_cancelled ? DIFFBIT_STOPPED : reason;
}

void diffbit_cancel(diffbit_model* model) { model->session.cancelled = true; }
