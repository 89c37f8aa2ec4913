// The text of tokens that arrive one by one (runtime/tokenizer.py explains the window). A token may end in the middle of
// a character; decoders show its unfinished bytes as U+FFFD, which this holds back.

const CONTEXT = 8; // prompt tokens at the start: enough for any character or leading space
const complete = (text) => text.replace(/\ufffd+$/, "").length;

export class TextStream {
  // decode(ids) -> text
  constructor(decode, prompt) {
    this.decode = decode;
    this.window = prompt.slice(-CONTEXT); // its first `whole` tokens end with a whole character; then the tokens since
    this.whole = this.window.length;
    this.returned = complete(decode(this.window)); // characters of the window that were returned already
  }

  // The text that a token completes; empty while a character is unfinished, and for special tokens
  push(id) {
    this.window.push(id);
    const text = this.decode(this.window);
    const end = complete(text);
    const more = text.slice(this.returned, end);
    this.returned = Math.max(this.returned, end);
    if (more && end === text.length) {
      this.window.splice(0, this.whole);
      this.returned = this.decode(this.window).length;
      this.whole = this.window.length;
    }
    return more;
  }

  // The remaining text: U+FFFD for an unfinished character
  finish() {
    const text = this.decode(this.window);
    const more = text.slice(this.returned);
    this.returned = text.length;
    return more;
  }
}
