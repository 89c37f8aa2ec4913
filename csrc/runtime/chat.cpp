#include "chat.h"

#include "../ort/op.h"

namespace diffbit::runtime {

std::string render_chat(const std::string& chat_template, JsonValue, const Messages&) {
  throw Error("the model has %s chat template that is known here; write the text yourself", chat_template.empty() ? "no" : "no common");
}

}  // namespace diffbit::runtime
