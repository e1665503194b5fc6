// Every text that is seen, with the colours it has: {seen, poor: [text, ratio, colours]} by WCAG 2.2, 1.4.3 (AA).
() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
  };
  const over = (top, under) => top.slice(0, 3).map((value, i) => value * top[3] + under[i] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((value) => value / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const opacity = (element) => {
    let all = 1;
    for (let each = element; each; each = each.parentElement) all *= Number(getComputedStyle(each).opacity);
    return all;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const poor = [];
  let seen = 0;
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility({ checkVisibilityCSS: true }) || element.closest(".hidden, option, :disabled")) continue;
    const style = getComputedStyle(element);
    const ground = behind(element);
    const ink = parse(style.color);
    ink[3] *= opacity(element);
    const [a, b] = [light(over(ink, ground)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const px = parseFloat(style.fontSize);
    const isLarge = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700);
    seen += 1;
    if (ratio < (isLarge ? 3 : 4.5)) poor.push([node.textContent.trim().slice(0, 40), ratio.toFixed(2), style.color, ground.map(Math.round).join()]);
  }
  return { seen, poor };
}
