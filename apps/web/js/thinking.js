// The variables by which a chat template lets a model think or not (runtime/template.py).

const SWITCHES = ["enable_thinking", "thinking"];

// template: of @huggingface/jinja -> those of SWITCHES that it reads and has not set before
export function switchesOf(template) {
  const [set, read] = [new Set(), new Set()];
  const assign = (node) => {
    if (node?.type === "Identifier") set.add(node.value);
    else if (node?.type === "TupleLiteral") node.value.forEach(assign);
    else walk(node);
  };
  const walk = (node) => {
    if (node instanceof Map) return [...node].forEach(walk);
    if (Array.isArray(node)) return node.forEach(walk);
    if (!node || typeof node !== "object") return;
    const { type, ...parts } = node;
    if (type === "Identifier" && !set.has(node.value)) read.add(node.value);
    if (type === "MemberExpression" && !node.computed) delete parts.property;
    if (type === "KeywordArgumentExpression") delete parts.key;
    if (type === "Set") walk([node.value, node.body]);
    if (type === "For") walk(node.iterable);
    [parts.assignee, parts.loopvar, parts.name].forEach(assign);
    if (type === "Macro") node.args.forEach(assign);
    for (const name of ["assignee", "loopvar", "name"]) delete parts[name];
    Object.values(parts).forEach(walk);
  };
  walk(template.parsed);
  return SWITCHES.filter((name) => read.has(name));
}

// The variables that turn thinking on or off; none where think is undefined. Throws for a template without a switch, unless
// its model does not think, and is not to
export function thinkingVariables(think, switches, source) {
  if (think === undefined) return {};
  if (typeof think !== "boolean") throw new TypeError(`think is ${think}, wanted true or false`);
  const thinks = source.includes("think>");
  if (!switches.length && (think || thinks))
    throw new Error(`The chat template has no switch for thinking: its model ${thinks ? "always thinks" : "does not think"}. Leave think out.`);
  return Object.fromEntries(switches.map((name) => [name, think]));
}
