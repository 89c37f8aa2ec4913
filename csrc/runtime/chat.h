// Chat templates without Jinja: those of common models, known by what is written in them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "json.h"

namespace diffbit::runtime {

using Messages = std::vector<std::pair<std::string, std::string>>;  // role, content

/// Returns the text of a conversation, up to where the answer begins. Throws Error for a template that is not known, and for
/// messages that it refuses. config: tokenizer_config.json.
std::string render_chat(const std::string& chat_template, JsonValue config, const Messages& messages);

}  // namespace diffbit::runtime
