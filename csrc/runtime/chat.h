// The text of a conversation, as the chat template of most models writes it: fixed texts around the messages, which `diffbit export`
// found (runtime/chat_form.py) and the manifest has.
#pragma once

#include <string>

#include "diffbit.h"
#include "json.h"

namespace diffbit::runtime {

/// Returns the text of a conversation, [system] user (assistant user)*, up to where the answer begins. chat: the manifest's field.
/// Throws Error for another conversation, or where the manifest has no such texts.
std::string conversation(JsonValue chat, const diffbit_message* messages, size_t count);

}  // namespace diffbit::runtime
