#include "chat.h"

#include "../ort/op.h"
#include "unicode.h"
#include "utf8.h"

namespace diffbit::runtime {
namespace {

bool is_blank(uint32_t code) { return unicode::is_space(code) || (code >= 0x1c && code <= 0x1f); }  // as Python has it

std::string_view stripped(std::string_view text, std::string_view ends) {
  if (ends == "left" || ends == "both")
    for (size_t at = 0; !text.empty() && is_blank(next_utf8(text, at)); at = 0) text.remove_prefix(at);
  if (ends == "right" || ends == "both")
    while (!text.empty() && is_blank(last_utf8(text))) text.remove_suffix(last_utf8_length(text));
  return text;
}

}  // namespace

std::string conversation(JsonValue chat, const diffbit_message* messages, size_t count) {
  if (!chat.is_object())
    throw Error("the model has no chat template, or one that is more than fixed texts around messages (docs/c.md); encode the text "
                "of the conversation yourself");
  std::string text;
  std::string_view before;  // role
  for (size_t i = 0; i < count; ++i) {
    if (!messages[i].role || !messages[i].content) throw Error("message %zu of the conversation has no role or no content", i + 1);
    const std::string_view role = messages[i].role, content(messages[i].content, messages[i].bytes);
    const bool is_next = role == "system" ? !i : role == "user" ? before != role : role == "assistant" && before == "user";
    if (!is_next)
      throw Error("message %zu of the conversation has the role %.40s; wanted are maybe a system message, then user and assistant by "
                  "turns", i + 1, messages[i].role);
    if (!is_utf8(content)) throw Error("message %zu of the conversation is not UTF-8", i + 1);
    if (role != "assistant" && stripped(content, "both").empty()) throw Error("message %zu of the conversation is empty", i + 1);
    const JsonValue slot = chat[role != "user" ? role : before.empty() ? "first" : before == "system" ? "after_system" : role];
    if (!slot.is_object()) throw Error("the model's chat template has no place for a system message; put it into the user's first");
    text.append(slot["text"].text()).append(stripped(content, slot["strip"].text()));
    before = role;
  }
  if (before != "user") throw Error("the conversation ends with another message than the user's");
  return text.append(chat["prompt"].text());
}

}  // namespace diffbit::runtime
